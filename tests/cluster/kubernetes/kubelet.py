"""Simulate the kubelets of a control plane: scheduled pods run as processes of this machine.

Logs, exec and port-forward are served over TLS as by a kubelet, so that they work through the real API server. A node's
disk is a folder, and so is a volume that a claim is bound to. If a pod mounts a volume, the path of the mount in its
command and environment is replaced by the path of the folder.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import itertools
import json
import os
import re
import signal
import socket as socket_module
import ssl
import subprocess
import sys
import sysconfig
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from tests.cluster.kubernetes.control_plane import now, path_with_tools, set_ready
from voxlane.cluster.kubernetes.client import Cluster, Object, path_of, path_of_object
from voxlane.errors import ClusterError, MissingObjectError

_POLL_S = 0.15
_MARK = "SIMULATED_POD"
"""Environment variable that marks the processes of a pod."""
_MAX_FAILING_S = 120.0
"""How long requests to the API server may fail, for example because the machine is busy."""
_WAIT_S = 120.0
_RENDEZVOUS_PORT = "29500"
"""Rendezvous port of training pods; here they share one machine, so it is replaced by a port of this kubelet."""


@dataclass
class _Container:
    spec: Object
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started_at: str = ""
    restarts: int = 0
    waiting: Object | None = None
    ended: Object | None = None


@dataclass
class _Running:
    pod: Object
    folder: Path
    containers: list[_Container] = field(default_factory=list)
    terminated_at: float | None = None
    reported: Any = None


def _install_python(folder: Path) -> Path:
    """Make a Python that finds this source tree and its packages even if it is isolated (-I), as that of an image."""
    import voxlane

    python, packages = folder / "bin/python3", folder / f"lib/python3.{sys.version_info.minor}/site-packages"
    packages.mkdir(parents=True)
    python.parent.mkdir()
    python.symlink_to(os.path.realpath(sys.executable))
    (folder / "pyvenv.cfg").write_text(f"home = {Path(os.path.realpath(sys.executable)).parent}\n")
    paths = [str(Path(voxlane.__file__).parents[1]), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    (packages / "image.pth").write_text("".join(f"{path}\n" for path in dict.fromkeys(paths)))
    return python


class Kubelet:
    """Kubelets of all nodes, as a context manager; `root/NODE` is the disk of a node."""

    def __init__(self, cluster: Cluster, root: Path, kubeconfig: Path) -> None:
        self.cluster = cluster
        self.root = root
        self.missing_images: set[str] = set()
        """Images that cannot be pulled."""
        self.environment: dict[str, str] = {}
        """Variables of every container, which override its own."""
        self.eviction: dict[str, Object] = {}
        """Settings of the kubelets about evictions, by node; other kubelets do not tell theirs."""
        self.down: set[str] = set()
        self._kubeconfig = kubeconfig
        self._pods: dict[str, _Running] = {}
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._port = 0
        # Holding the bound socket reserves the port: a pod can still bind it, because both sockets allow reuse.
        self._reserved = socket_module.socket()
        self._reserved.setsockopt(socket_module.SOL_SOCKET, socket_module.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self._rendezvous = str(self._reserved.getsockname()[1])
        self.failure: BaseException | None = None
        self._turns = itertools.count()
        self._python = _install_python(root / ".image")

    def __enter__(self) -> Kubelet:
        ready = threading.Event()
        self._server = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._server.start()
        assert ready.wait(_WAIT_S)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_WAIT_S)
        for running in self._pods.values():
            self._kill(running)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._server.join(_WAIT_S)
        self._reserved.close()
        if self.failure is not None:
            raise self.failure

    def disk(self, node: str, path: str = "") -> Path:
        """Return a path on the disk of a node."""
        return self.root / node / path.lstrip("/")

    def lose(self, node: str) -> None:
        """Simulate the loss of a machine: its processes end without a report."""
        self.down.add(node)
        for running in list(self._pods.values()):
            if running.pod["spec"]["nodeName"] == node:
                self._kill(running)
        set_ready(self.cluster, node, "Unknown")

    def bring_back(self, node: str) -> None:
        """Bring a lost machine back with its disk."""
        self.down.discard(node)
        set_ready(self.cluster, node, "True")

    def processes(self, node: str | None = None) -> list[subprocess.Popen[bytes]]:
        """Return the processes of running containers."""
        return [
            container.process
            for running in list(self._pods.values())
            for container in running.containers
            if container.process is not None and container.process.poll() is None
            if node is None or running.pod["spec"]["nodeName"] == node
        ]

    # -- pods ----------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        last_success = time.monotonic()
        while not self._stop.wait(_POLL_S):
            try:
                self._step_all()
                last_success = time.monotonic()
            except ClusterError as error:
                if time.monotonic() - last_success > _MAX_FAILING_S:
                    self.failure = error
                    return

    def _step_all(self) -> None:
        for node in self.cluster.list(path_of("v1", "Node")):
            endpoint = node["status"].get("daemonEndpoints", {}).get("kubeletEndpoint", {}).get("Port")
            if endpoint != self._port:
                changes = {
                    "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                    "daemonEndpoints": {"kubeletEndpoint": {"Port": self._port}},
                }
                with contextlib.suppress(MissingObjectError):
                    self.cluster.patch(path_of_object(node), {"status": changes}, subresource="status")
        pods = {}
        for pod in self.cluster.list("/api/v1/pods", fields="spec.nodeName!="):
            if pod["spec"]["nodeName"] not in self.down:
                pods[pod["metadata"]["uid"]] = pod
        for uid, pod in pods.items():
            running = self._pods.get(uid)
            if running is None and pod["status"].get("phase") in (None, "Pending"):
                folder = self.root / pod["spec"]["nodeName"] / ".pods" / uid
                folder.mkdir(parents=True, exist_ok=True)
                containers = [
                    _Container(container, folder / f"{container['name']}.log")
                    for container in pod["spec"]["containers"]
                ]
                running = self._pods[uid] = _Running(pod, folder, containers)
            if running is not None:
                running.pod = pod
                self._step(running)
            elif "deletionTimestamp" in pod["metadata"]:
                self.cluster.delete(path_of_object(pod), grace_s=0)
        for uid in [uid for uid in self._pods if uid not in pods]:
            if self._pods[uid].pod["spec"]["nodeName"] not in self.down:
                self._kill(self._pods.pop(uid))

    def _step(self, running: _Running) -> None:
        """Take the containers and the status of a pod one step further."""
        pod, policy = running.pod, running.pod["spec"].get("restartPolicy", "Always")
        deleted = "deletionTimestamp" in pod["metadata"]
        for container in running.containers:
            if container.process is None and not deleted and (container.ended is None or policy == "Always"):
                self._start(running, container)
            elif container.process is not None and container.process.poll() is not None:
                code = container.process.returncode
                code = 128 - code if code < 0 else code
                container.ended = {"exitCode": code, "reason": "Error" if code else "Completed"}
                container.ended |= {"startedAt": container.started_at, "finishedAt": now()}
                if (message := running.folder / f"{container.spec['name']}.last-words").exists():
                    container.ended["message"] = message.read_text()[:4096]
                container.process = None
                if policy == "Always" or (policy == "OnFailure" and code):
                    container.restarts += 1
                    container.ended = None if policy == "OnFailure" else container.ended
        if deleted:
            if running.terminated_at is None:
                running.terminated_at = time.monotonic()
                self._signal(running, signal.SIGTERM)
            grace = pod["metadata"].get("deletionGracePeriodSeconds", 30)
            if time.monotonic() - running.terminated_at > grace:
                self._signal(running, signal.SIGKILL)
            if all(container.process is None for container in running.containers):
                self._report(running)
                self.cluster.delete(path_of_object(pod), grace_s=0)
                return
        self._report(running)

    def _report(self, running: _Running) -> None:
        states, has_ended = [], all(container.process is None and container.ended for container in running.containers)
        for container in running.containers:
            state = (
                {"waiting": container.waiting}
                if container.waiting
                else {"running": {"startedAt": container.started_at}}
            )
            if container.process is None and container.ended:
                state = {"terminated": container.ended}
            states.append(
                {
                    "name": container.spec["name"],
                    "image": container.spec["image"],
                    "imageID": "",
                    "ready": container.process is not None,
                    "restartCount": container.restarts,
                    "state": state,
                }
            )
        codes = [container.ended["exitCode"] for container in running.containers if container.ended]
        phase = "Pending" if any(container.waiting for container in running.containers) else "Running"
        if has_ended and running.pod["spec"].get("restartPolicy") != "Always":
            phase = "Failed" if any(codes) else "Succeeded"
        ready = "True" if phase == "Running" else "False"
        conditions = [
            c for c in running.pod["status"].get("conditions", []) if c["type"] not in ("Ready", "ContainersReady")
        ]
        conditions += [
            {"type": name, "status": ready, "lastTransitionTime": now()} for name in ("Ready", "ContainersReady")
        ]
        status = {"phase": phase, "containerStatuses": states, "hostIP": "127.0.0.1", "podIP": "127.0.0.1"}
        if (report := (status, ready)) == running.reported:
            return
        running.reported = report
        started_at = {"startTime": running.pod["status"].get("startTime") or now()}
        with contextlib.suppress(MissingObjectError):
            self.cluster.patch(
                path_of_object(running.pod),
                {"status": {**status, **started_at, "conditions": conditions}},
                subresource="status",
            )

    def _start(self, running: _Running, container: _Container) -> None:
        if container.spec["image"] in self.missing_images:
            message = f'Back-off pulling image "{container.spec["image"]}"'
            container.waiting = {"reason": "ImagePullBackOff", "message": message}
            return
        try:
            command, env = self._command(running, container.spec)
        except MissingObjectError as error:
            container.waiting = {"reason": "CreateContainerConfigError", "message": str(error).split(": ")[-1]}
            return
        container.waiting, container.started_at = None, now()
        with open(container.log, "ab") as log:
            try:
                container.process = subprocess.Popen(
                    command,
                    env=env,
                    cwd=running.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except FileNotFoundError:
                container.ended = {"exitCode": 127, "reason": "StartError", "startedAt": now(), "finishedAt": now()}
                container.ended["message"] = f"exec: {command[0]!r}: executable file not found"

    def _command(self, running: _Running, spec: Object) -> tuple[list[str], dict[str, str]]:
        """Return the command and the environment of a container, with the paths of this machine."""
        pod, namespace = running.pod, running.pod["metadata"]["namespace"]
        env = {
            "PATH": f"{self._python.parent}{os.pathsep}{path_with_tools()}",
            "HOME": str(running.folder),
            "KUBECONFIG": str(self._kubeconfig),
        }
        env |= {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ}
        env["OMP_WAIT_POLICY"] = "PASSIVE"
        own: dict[str, str] = {}
        for source in spec.get("envFrom", []):
            if "secretRef" in source:
                own |= self._secret(namespace, source["secretRef"]["name"])
            else:
                path = path_of("v1", "ConfigMap", namespace, source["configMapRef"]["name"])
                own |= self.cluster.get(path).get("data", {})
        for entry in spec.get("env", []):
            reference = (entry.get("valueFrom") or {}).get("secretKeyRef") or {}
            try:
                own[entry["name"]] = self._value(pod, entry)
            except MissingObjectError:
                if not reference.get("optional"):
                    raise
        mounts = self._mounts(running, spec)

        def localize(text: str) -> str:
            text = re.sub(r"\$\((\w+)\)", lambda match: own.get(match[1], match[0]), text)
            for path, folder in mounts:
                text = re.sub(rf"(?<![\w/.-]){re.escape(path)}(?![\w.-])", str(folder), text)
            text = re.sub(rf"(?<!\d){_RENDEZVOUS_PORT}(?!\d)", self._rendezvous, text)
            if subdomain := pod["spec"].get("subdomain"):
                text = re.sub(rf"[\w-]+\.{re.escape(subdomain)}(?=$|[:,\s])", "127.0.0.1", text)
            return text

        own = {name: localize(value) for name, value in own.items()}
        command = [localize(word) for word in (*spec.get("command", []), *spec.get("args", []))]
        return command, {**env, **own, **self.environment, _MARK: pod["metadata"]["uid"]}

    def _secret(self, namespace: str, name: str) -> dict[str, str]:
        data = self.cluster.get(path_of("v1", "Secret", namespace, name)).get("data", {})
        return {key: base64.b64decode(value).decode() for key, value in data.items()}

    def _value(self, pod: Object, entry: Object) -> str:
        origin, namespace = entry.get("valueFrom"), pod["metadata"]["namespace"]
        if origin is None:
            return str(entry.get("value", ""))
        if "secretKeyRef" in origin:
            name, key = origin["secretKeyRef"]["name"], origin["secretKeyRef"]["key"]
            values = self._secret(namespace, name)
            if key not in values:
                raise MissingObjectError(f"couldn't find key {key} in Secret {namespace}/{name}")
            return values[key]
        if "configMapKeyRef" in origin:
            ref = origin["configMapKeyRef"]
            return str(self.cluster.get(path_of("v1", "ConfigMap", namespace, ref["name"]))["data"][ref["key"]])
        path = origin["fieldRef"]["fieldPath"]
        if (match := re.match(r"metadata\.(labels|annotations)\['(.+)'\]", path)) is not None:
            return str(pod["metadata"].get(match[1], {}).get(match[2], ""))
        value: Any = pod
        for part in path.split("."):
            value = value.get(part, "")
        return str(value)

    def _claimed_volume(self, running: _Running, claim: str) -> Object:
        """Return the source of the volume that a claim is bound to."""
        path = path_of("v1", "PersistentVolumeClaim", running.pod["metadata"]["namespace"], claim)
        bound = self.cluster.get(path)["spec"]["volumeName"]
        spec: Object = self.cluster.get(path_of("v1", "PersistentVolume", None, bound))["spec"]
        return spec

    def _mounts(self, running: _Running, spec: Object) -> list[tuple[str, Path]]:
        """Return (path in the container, folder of this machine) of all mounts, longest path first."""
        volumes = {volume["name"]: volume for volume in running.pod["spec"].get("volumes", [])}
        termination_log = running.folder / f"{spec['name']}.last-words"
        mounts = [(spec.get("terminationMessagePath", "/dev/termination-log"), termination_log)]
        for mount in spec.get("volumeMounts", []):
            volume = volumes[mount["name"]]
            folder = running.folder / "volumes" / mount["name"]
            if "persistentVolumeClaim" in volume:
                volume = self._claimed_volume(running, volume["persistentVolumeClaim"]["claimName"])
            if "hostPath" in volume:
                folder = self.disk(running.pod["spec"]["nodeName"], volume["hostPath"]["path"])
                if volume["hostPath"].get("type") == "Directory" and not folder.is_dir():
                    raise MissingObjectError(
                        f"hostPath type check failed: {volume['hostPath']['path']} is not a directory"
                    )
            folder.mkdir(parents=True, exist_ok=True)
            namespace = running.pod["metadata"]["namespace"]
            if "configMap" in volume:
                data = self.cluster.get(path_of("v1", "ConfigMap", namespace, volume["configMap"]["name"])).get(
                    "data", {}
                )
                for name, text in data.items():
                    (folder / name).write_text(text)
            if "secret" in volume:
                for name, text in self._secret(namespace, volume["secret"]["secretName"]).items():
                    (folder / name).write_text(text)
            if "nfs" in volume:
                folder = Path(volume["nfs"]["path"])
            if "persistentVolumeClaim" in volumes[mount["name"]]:
                os.chown(folder, os.geteuid(), os.getegid())  # the pods' processes run as this user, not as copiers'
            mounts.append((mount["mountPath"], folder / mount.get("subPath", "")))
        return sorted(mounts, key=lambda pair: -len(pair[0]))

    @staticmethod
    def _signal(running: _Running, number: int) -> None:
        for container in running.containers:
            if container.process is not None and container.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    if number == signal.SIGKILL:
                        os.killpg(container.process.pid, number)
                    else:
                        container.process.send_signal(number)  # like a container runtime, only to the first process

    def _kill(self, running: _Running) -> None:
        self._signal(running, signal.SIGKILL)
        mark = f"{_MARK}={running.pod['metadata']['uid']}".encode()
        # Processes in other sessions end with their container too.
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)
        for container in running.containers:
            if container.process is not None:
                container.process.wait()

    # -- logs, exec, port-forward --------------------------------------------------------------------------------------

    def _serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.new_event_loop()
        app = web.Application()
        app.router.add_get("/configz", self._config)
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._logs)
        app.router.add_get("/exec/{namespace}/{pod}/{container}", self._exec)
        app.router.add_get("/portForward/{namespace}/{pod}", self._forward)
        certificates = self._kubeconfig.parent / "certs"
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificates / "apiserver.crt", certificates / "apiserver.key")

        async def start() -> web.AppRunner:
            runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.2)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
            await site.start()
            self._port = runner.addresses[0][1]
            ready.set()
            return runner

        runner = self._loop.run_until_complete(start())
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.run_until_complete(asyncio.sleep(0.1))  # lets TLS connections shut down
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def _find_pod(self, request: web.Request) -> _Running:
        for running in list(self._pods.values()):
            meta = running.pod["metadata"]
            if (meta["namespace"], meta["name"]) == (request.match_info["namespace"], request.match_info["pod"]):
                return running
        raise web.HTTPNotFound(text="no such pod")

    async def _config(self, request: web.Request) -> web.Response:
        """Return the configuration of a kubelet. All of them share this server, so it is that of all nodes in turn."""
        if not self.eviction:
            raise web.HTTPNotFound(text="no such page")
        node = sorted(self.eviction)[next(self._turns) % len(self.eviction)]
        return web.json_response({"kubeletconfig": self.eviction[node]})

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        running = self._find_pod(request)
        name = request.match_info["container"]
        container = next(c for c in running.containers if c.spec["name"] == name)
        stamped = request.query.get("timestamps") == "true"
        follow = request.query.get("follow") == "true"
        answer = web.StreamResponse()
        answer.content_type = "text/plain"
        await answer.prepare(request)
        offset, first = 0, True
        while True:
            ended = container.process is None or container.process.poll() is not None
            body = container.log.read_bytes() if container.log.exists() else b""
            new = body[offset:] if ended else body[offset : body.rfind(b"\n") + 1]
            offset += len(new)
            lines = new.splitlines(keepends=True)
            if first and "tailLines" in request.query:
                lines = lines[-int(request.query["tailLines"]) or len(lines) :]
            first = False
            stamp = f"{datetime.datetime.now(datetime.UTC).isoformat().replace('+00:00', 'Z')} ".encode() * stamped
            if lines:
                await answer.write(b"".join(stamp + line for line in lines))
            if ended or not follow:
                break
            await asyncio.sleep(0.1)
        await answer.write_eof()
        return answer

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        running = self._find_pod(request)
        container = next(c for c in running.containers if c.spec["name"] == request.match_info["container"])
        _, env = self._command(running, container.spec)
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *request.query.getall("command"), env=env, cwd=running.folder, stdin=pipe, stdout=pipe, stderr=pipe
            )
        except FileNotFoundError as error:
            await socket.send_bytes(b"\x03" + json.dumps({"status": "Failure", "message": str(error)}).encode())
            await socket.close()
            return socket

        async def pump(source: asyncio.StreamReader, channel: int) -> None:
            while data := await source.read(65536):
                await socket.send_bytes(bytes([channel]) + data)

        async def receive() -> None:
            assert process.stdin is not None
            async for message in socket:
                if message.type == WSMsgType.BINARY and message.data[:1] == b"\0":
                    process.stdin.write(message.data[1:])
            process.stdin.close()

        assert process.stdout is not None
        assert process.stderr is not None
        receiver = asyncio.create_task(receive())
        await asyncio.gather(pump(process.stdout, 1), pump(process.stderr, 2))
        code = await process.wait()
        status: Object = {"metadata": {}, "status": "Success" if code == 0 else "Failure"}
        if code:
            causes = [{"reason": "ExitCode", "message": str(code)}]
            status |= {"reason": "NonZeroExitCode", "details": {"causes": causes}}
            status["message"] = f"command terminated with exit code {code}"
        await socket.send_bytes(b"\x03" + json.dumps(status).encode())
        receiver.cancel()
        await socket.close()
        return socket

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        self._find_pod(request)
        ports = [int(port) for value in request.query.getall("port") for port in value.split(",")]
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        for number, port in enumerate(ports):
            for channel in (2 * number, 2 * number + 1):
                await socket.send_bytes(bytes([channel]) + port.to_bytes(2, "little"))
        streams, tasks = {}, []

        async def pump(reader: asyncio.StreamReader, channel: int) -> None:
            while data := await reader.read(65536):
                await socket.send_bytes(bytes([channel]) + data)
            await socket.close()

        for number, port in enumerate(ports):
            try:
                reader, streams[2 * number] = await asyncio.open_connection("127.0.0.1", port)
            except OSError as error:
                await socket.send_bytes(bytes([2 * number + 1]) + str(error).encode())
                await socket.close()
                return socket
            tasks.append(asyncio.create_task(pump(reader, 2 * number)))
        async for message in socket:
            if message.type == WSMsgType.BINARY and message.data[0] in streams:
                streams[message.data[0]].write(message.data[1:])
        for task in tasks:
            task.cancel()
        for stream in streams.values():
            stream.close()
        return socket
