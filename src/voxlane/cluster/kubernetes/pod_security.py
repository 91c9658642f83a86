"""Kubernetes' Pod Security Standards: what voxlane's own pods set, and what a level would refuse. Pure.

The rules are those of https://kubernetes.io/docs/concepts/security/pod-security-standards for Linux pods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Object = Mapping[str, Any]
ENFORCE_LABEL = "pod-security.kubernetes.io/enforce"
"""Label of a namespace: the level whose violations the cluster refuses."""
LEVELS = ("privileged", "baseline", "restricted")
SECCOMP = {"type": "RuntimeDefault"}
CONTAINER_SECURITY: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
"""Security context of containers that the level `restricted` admits."""

_BASELINE_CAPABILITIES = {
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP"),
    *("SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
}
_RESTRICTED_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected"),
    "secret",
}
_SELINUX_TYPES = {None, "", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
_SYSCTLS = {
    *("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start"),
    *("net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports"),
    *("net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl"),
    *("net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem", "net.ipv4.tcp_slow_start_after_idle"),
    "net.ipv4.tcp_notsent_lowat",
}


def build_pod_security(user: int) -> dict[str, Any]:
    """Return the security context of a pod that runs as this user and group, for `restricted`."""
    return {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "seccompProfile": dict(SECCOMP)}


def get_enforced_level(namespace: Object) -> str:
    """Return the level that a namespace enforces; `privileged` if it names none, which is Kubernetes' default."""
    level = str((namespace["metadata"].get("labels") or {}).get(ENFORCE_LABEL, "privileged"))
    return level if level in LEVELS else "restricted"  # as the cluster treats a level that it does not know


def find_violations(pod: Object, level: str) -> list[str]:
    """Return what a level refuses about a pod or a pod template; [] if it admits the pod."""
    if level == "privileged":
        return []
    violations = list(_find_baseline_violations(pod))
    if level == "restricted":
        violations += _find_restricted_violations(pod["spec"])
    return list(dict.fromkeys(violations))


def list_pod_templates(manifest: Object) -> list[Object]:
    """Return the pod templates of a workload, wherever its kind has them."""
    templates: list[Object] = []
    _collect_templates(manifest.get("spec"), templates)
    return [manifest] if manifest["kind"] == "Pod" else templates


def _collect_templates(value: Any, templates: list[Object]) -> None:
    if isinstance(value, Mapping):
        spec = value.get("spec")
        # The containers of a TrainJob's template have no image, because they are changes of those of its runtime.
        containers = spec.get("containers") or () if isinstance(spec, Mapping) else ()
        if any(item.keys() & {"image", "securityContext"} for item in containers):
            templates.append(value)
            return
        for item in value.values():
            _collect_templates(item, templates)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            _collect_templates(item, templates)


# -- rules -------------------------------------------------------------------------------------------------------------


def _list_containers(spec: Object) -> list[Object]:
    kinds = ("initContainers", "containers", "ephemeralContainers")
    return [container for kind in kinds for container in spec.get(kind) or ()]


def _list_contexts(spec: Object) -> list[tuple[str, Object]]:
    """Return the security contexts of a pod and its containers, with what each belongs to."""
    containers = [(f"container {item['name']}", item.get("securityContext") or {}) for item in _list_containers(spec)]
    return [("pod", spec.get("securityContext") or {}), *containers]


def _find_baseline_violations(pod: Object) -> Iterator[str]:
    spec = pod["spec"]
    yield from (f"{name} is true" for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name))
    for volume in spec.get("volumes") or ():
        if volume.get("hostPath") is not None:
            yield f"volume {volume['name']} is a hostPath"
    for title, context in _list_contexts(spec):
        yield from _find_context_violations(title, context)
        if context.get("procMount") not in (None, "", "Default") and spec.get("hostUsers") is not False:
            yield f"{title} has procMount {context['procMount']}"
    for sysctl in (spec.get("securityContext") or {}).get("sysctls") or ():
        if sysctl["name"] not in _SYSCTLS:
            yield f"sysctl {sysctl['name']} is set"
    for container in _list_containers(spec):
        yield from _find_container_violations(container)
    for name, value in ((pod.get("metadata") or {}).get("annotations") or {}).items():
        is_profile = name.startswith("container.apparmor.security.beta.kubernetes.io/")
        if is_profile and value not in ("", "runtime/default") and not value.startswith("localhost/"):
            yield f"annotation {name} is {value}"


def _find_context_violations(title: str, context: Object) -> Iterator[str]:
    if context.get("privileged"):
        yield f"{title} is privileged"
    if (context.get("windowsOptions") or {}).get("hostProcess"):
        yield f"{title} is a host process"
    for name in ("seccompProfile", "appArmorProfile"):
        if (context.get(name) or {}).get("type") == "Unconfined":
            yield f"{title} has {name} Unconfined"
    added = (context.get("capabilities") or {}).get("add") or ()
    yield from (f"{title} adds capability {name}" for name in added if name not in _BASELINE_CAPABILITIES)
    options = context.get("seLinuxOptions") or {}
    if options.get("type") not in _SELINUX_TYPES or options.get("user") or options.get("role"):
        yield f"{title} sets seLinuxOptions"


def _find_container_violations(container: Object) -> Iterator[str]:
    for port in container.get("ports") or ():
        if port.get("hostPort"):
            yield f"container {container['name']} uses hostPort {port['hostPort']}"
    handlers = [container.get(f"{kind}Probe") or {} for kind in ("liveness", "readiness", "startup")]
    handlers += list((container.get("lifecycle") or {}).values())
    for handler in handlers:
        for kind in ("httpGet", "tcpSocket"):
            if (handler.get(kind) or {}).get("host"):
                yield f"container {container['name']} probes another host"


def _find_restricted_violations(spec: Object) -> Iterator[str]:
    for volume in spec.get("volumes") or ():
        for kind in sorted(volume.keys() - {"name"} - _RESTRICTED_VOLUMES):
            yield f"volume {volume['name']} is of the type {kind}"
    pod_context = spec.get("securityContext") or {}
    if pod_context.get("runAsUser") == 0:
        yield "pod runs as root (runAsUser 0)"
    if pod_context.get("runAsNonRoot") is False:
        yield "pod has runAsNonRoot false"
    for container in _list_containers(spec):
        yield from _find_unrestricted(container, pod_context)


def _find_unrestricted(container: Object, pod_context: Object) -> Iterator[str]:
    title, context = f"container {container['name']}", container.get("securityContext") or {}
    if context.get("allowPrivilegeEscalation") is not False:
        yield f"{title} does not set allowPrivilegeEscalation to false"
    if context.get("runAsNonRoot", pod_context.get("runAsNonRoot")) is not True:
        yield f"{title} does not set runAsNonRoot to true"
    if context.get("runAsUser") == 0:
        yield f"{title} runs as root (runAsUser 0)"
    if context.get("procMount") not in (None, "", "Default"):
        yield f"{title} has procMount {context['procMount']}"
    profile = context.get("seccompProfile") or pod_context.get("seccompProfile") or {}
    if profile.get("type") not in ("RuntimeDefault", "Localhost"):
        yield f"{title} does not set seccompProfile to RuntimeDefault"
    capabilities = context.get("capabilities") or {}
    if "ALL" not in (capabilities.get("drop") or ()):
        yield f"{title} does not drop all capabilities"
    for name in capabilities.get("add") or ():
        if name != "NET_BIND_SERVICE":
            yield f"{title} adds capability {name}"
