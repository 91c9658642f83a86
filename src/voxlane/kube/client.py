"""One Kubernetes API server: objects as plain dicts, errors as sentences.

Paths are the server's own (`/api/v1/namespaces/NS/pods`); `path_of` makes one from a manifest. The `kubernetes` package
reads kubeconfig and the pod's own credentials and keeps the connection; its models are not used, because they cost a
second to load for hundreds of pods and know nothing of custom resources.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

import yaml

from voxlane.errors import ClusterError, ForbiddenError, MissingExtraError, MissingObjectError

Object = dict[str, Any]
_TIMEOUT_S = 30.0
_CONNECT_S = 5.0
_PAGE = 500
_CONNECTIONS = 64
FIELD_MANAGER = "voxlane"

PLURALS = {
    "ConfigMap": "configmaps",
    "CustomResourceDefinition": "customresourcedefinitions",
    "ClusterRole": "clusterroles",
    "ClusterRoleBinding": "clusterrolebindings",
    "Deployment": "deployments",
    "Event": "events",
    "Job": "jobs",
    "JobSet": "jobsets",
    "LocalQueue": "localqueues",
    "Namespace": "namespaces",
    "Node": "nodes",
    "Pod": "pods",
    "RayJob": "rayjobs",
    "RayCluster": "rayclusters",
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "Secret": "secrets",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
    "StagedDataset": "stageddatasets",
    "TrainJob": "trainjobs",
    "ClusterTrainingRuntime": "clustertrainingruntimes",
    "TrainingRuntime": "trainingruntimes",
    "Workload": "workloads",
}
CLUSTER_WIDE = {"Namespace", "Node", "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"} | {
    "ClusterTrainingRuntime"
}


def path_of(api_version: str, kind: str, namespace: str | None = None, name: str | None = None) -> str:
    """The server's path of a kind (to list or create) or of one object."""
    head = f"/api/{api_version}" if "/" not in api_version else f"/apis/{api_version}"
    where = f"/namespaces/{quote(namespace)}" if namespace and kind not in CLUSTER_WIDE else ""
    return f"{head}{where}/{PLURALS[kind]}" + (f"/{quote(name)}" if name else "")


def path_of_object(manifest: Mapping[str, Any], namespace: str | None = None) -> str:
    """The server's path of the object that a manifest describes."""
    meta = manifest["metadata"]
    return path_of(manifest["apiVersion"], manifest["kind"], meta.get("namespace", namespace), meta["name"])


class Cluster:
    """A connection. `namespace` is the one that the kubeconfig's context (or the pod) is in."""

    def __init__(self, api: Any, *, namespace: str, name: str) -> None:
        self._api = api
        self.namespace = namespace
        self.name = name
        """The context's name, for messages."""

    @classmethod
    def connect(cls, *, context: str | None = None, namespace: str | None = None) -> Cluster:
        """As kubectl does: KUBECONFIG or ~/.kube/config, and inside a pod its service account. Nothing is sent yet."""
        try:
            from kubernetes import config as kubeconfig
            from kubernetes.client import ApiClient, Configuration
        except ImportError:
            raise MissingExtraError.of("kubernetes", "Kubernetes") from None
        how = Configuration()
        how.retries = 2
        how.connection_pool_maxsize = _CONNECTIONS
        where = os.environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")
        try:
            if context is None and "KUBECONFIG" not in os.environ and "KUBERNETES_SERVICE_HOST" in os.environ:
                kubeconfig.load_incluster_config(client_configuration=how)
                with open("/var/run/secrets/kubernetes.io/serviceaccount/namespace", encoding="utf-8") as file:
                    own = file.read().strip()
                return cls(_shared(ApiClient(how)), namespace=namespace or own, name="in-cluster")
            # Named, because the package reads KUBECONFIG once, when it is imported.
            with _complaints() as complaints:
                kubeconfig.load_kube_config(config_file=where, context=context, client_configuration=how)
            contexts, active = kubeconfig.list_kube_config_contexts(config_file=where)
        except (kubeconfig.ConfigException, OSError, yaml.YAMLError) as error:
            said = "it is no YAML" if isinstance(error, yaml.YAMLError) else str(error).splitlines()[0]
            raise ClusterError(
                f"no cluster is configured: {said}",
                uri=where,
                fix="Set KUBECONFIG or --context to a cluster that kubectl reaches",
            ) from None
        if complaints and not how.api_key and not how.cert_file:
            # The package goes on without credentials, and every request would be refused as nobody's.
            raise ClusterError(
                f"the program that gives credentials failed: {complaints[0]}",
                uri=where,
                fix="Log in again, or install it",
            )
        if not how.verify_ssl:  # the user's kubeconfig says so; kubectl is silent as well
            import urllib3

            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        chosen = next((one for one in contexts if one["name"] == context), active) if context else active
        own = chosen.get("context", {}).get("namespace") or "default"
        return cls(_shared(ApiClient(how)), namespace=namespace or own, name=chosen["name"])

    # -- requests ------------------------------------------------------------------------------------------------------

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        timeout_s: float | None = _TIMEOUT_S,
    ) -> Any:
        """The server's answer as plain data. An object that is not there is MissingObjectError, one that may not be
        touched ForbiddenError; both are ClusterErrors."""
        import urllib3

        answer = self._send(method, path, body, query, content_type, timeout_s)
        try:
            text = answer.data
        except urllib3.exceptions.HTTPError as error:
            raise self._broken(error) from None
        return json.loads(text) if text else None

    def stream(
        self, path: str, *, query: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> Iterator[bytes]:
        """The answer's lines as they come, without their ends; for logs and watches."""
        import urllib3

        answer = self._send("GET", path, None, query, "application/json", timeout_s)
        rest = b""
        try:
            for chunk in answer.stream(64 * 1024, decode_content=True):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from lines
            if rest:
                yield rest
        except urllib3.exceptions.HTTPError as error:
            raise self._broken(error) from None
        finally:
            answer.close()

    def socket(self, path: str, *, query: Sequence[tuple[str, str]] = ()) -> Any:
        """A websocket (of the package websocket-client) to a path of the server, as exec and port-forward speak: each
        frame's first byte is its channel."""
        from kubernetes.stream.ws_client import create_websocket, get_websocket_url
        from websocket import WebSocketBadStatusException, WebSocketException

        headers: dict[str, str] = {}
        self._api.update_params_for_auth(headers, [], ["BearerToken"], path, "GET", None)
        url = get_websocket_url(self._api.configuration.host + path, list(query))
        try:
            return create_websocket(
                self._api.configuration, url, {name.lower(): value for name, value in headers.items()}
            )
        except WebSocketBadStatusException as error:
            raise refusal(error.status_code, error.resp_body or b"", "GET", path, self) from None
        except (WebSocketException, OSError) as error:
            raise self._broken(error) from None

    def _broken(self, error: Exception) -> ClusterError:
        """What to raise when the connection failed."""
        import ssl

        reason = getattr(error, "reason", None) or error
        if isinstance(reason, ssl.SSLError) or "SSL" in type(reason).__name__:
            return ClusterError(
                "its certificate is not one that kubeconfig trusts",
                uri=self._api.configuration.host,
                fix=f"Fetch the credentials of context {self.name} anew",
            )
        return ClusterError(
            f"the cluster does not answer: {type(reason).__name__}",
            uri=self._api.configuration.host,
            fix=f"Check that the cluster of context {self.name} runs and is reachable from here",
        )

    def _send(
        self,
        method: str,
        path: str,
        body: Any,
        query: Mapping[str, Any] | None,
        content_type: str,
        timeout_s: float | None,
    ) -> Any:
        import urllib3

        url = self._api.configuration.host + path + (f"?{urlencode(query)}" if query else "")
        headers = {"Accept": "application/json", "Content-Type": content_type}
        self._api.update_params_for_auth(headers, [], ["BearerToken"], path, method, None)
        try:
            answer = self._api.rest_client.pool_manager.request(
                method,
                url,
                body=None if body is None else json.dumps(body),
                headers=headers,
                timeout=urllib3.Timeout(connect=_CONNECT_S, read=timeout_s),
                preload_content=False,
            )
        except urllib3.exceptions.HTTPError as error:
            raise self._broken(error) from None
        if answer.status >= 400:
            raise refusal(answer.status, answer.data, method, path, self)
        return answer

    # -- objects -------------------------------------------------------------------------------------------------------

    def get(self, path: str) -> Object:
        """One object."""
        found: Object = self.request("GET", path)
        return found

    def find(self, path: str) -> Object | None:
        """One object, None where it (or its kind) is not there."""
        try:
            return self.get(path)
        except MissingObjectError:
            return None

    def list(self, path: str, *, labels: str = "", fields: str = "") -> list[Object]:
        """Objects of a kind, in pages; [] where the cluster has no such kind."""
        query: dict[str, Any] = {"limit": _PAGE}
        if labels:
            query["labelSelector"] = labels
        if fields:
            query["fieldSelector"] = fields
        found: list[Object] = []
        while True:
            try:
                page = self.request("GET", path, query=query)
            except MissingObjectError:
                return found
            kind, version = page["kind"].removesuffix("List"), page["apiVersion"]
            found += [{"kind": kind, "apiVersion": version, **item} for item in page["items"]]
            if not (token := page["metadata"].get("continue")):
                return found
            query["continue"] = token

    def create(self, manifest: Mapping[str, Any], *, dry_run: bool = False) -> Object:
        """Create an object; the server's version of it. One that is there already is a ClusterError."""
        namespace = manifest["metadata"].get("namespace", self.namespace)
        path = path_of(manifest["apiVersion"], manifest["kind"], namespace)
        query = {"fieldManager": FIELD_MANAGER, **({"dryRun": "All"} if dry_run else {})}
        made: Object = self.request("POST", path, manifest, query=query)
        return made

    def apply(self, manifest: Mapping[str, Any], *, dry_run: bool = False) -> Object:
        """Create an object or change it to what the manifest says (server-side apply)."""
        path = path_of_object(manifest, self.namespace)
        query = {"fieldManager": FIELD_MANAGER, "force": "true", **({"dryRun": "All"} if dry_run else {})}
        made: Object = self.request("PATCH", path, manifest, query=query, content_type="application/apply-patch+yaml")
        return made

    def patch(self, path: str, changes: Mapping[str, Any], *, subresource: str = "") -> Object:
        """Merge `changes` into an object (RFC 7386: null removes)."""
        where = f"{path}/{subresource}" if subresource else path
        made: Object = self.request("PATCH", where, changes, content_type="application/merge-patch+json")
        return made

    def delete(self, path: str, *, foreground: bool = False, grace_s: int | None = None) -> bool:
        """Delete an object, with what it owns; returns whether it was there."""
        options: dict[str, Any] = {"propagationPolicy": "Foreground" if foreground else "Background"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        try:
            self.request("DELETE", path, options)
        except MissingObjectError:
            return False
        return True

    def serves(self, api_version: str, kind: str) -> bool:
        """Whether the cluster has this kind: a custom resource's definition may not be installed."""
        head = f"/api/{api_version}" if "/" not in api_version else f"/apis/{api_version}"
        found = self.find(head)
        return found is not None and any(one["kind"] == kind for one in found["resources"])

    def may(self, verb: str, api_version: str, kind: str, namespace: str | None = None, subresource: str = "") -> bool:
        """Whether this user may do `verb` on a kind, as the server says; an empty namespace means all of them."""
        group, own = api_version.rpartition("/")[0], self.namespace if namespace is None else namespace
        asked = {
            "verb": verb,
            "group": group,
            "resource": PLURALS[kind],
            **({"subresource": subresource} if subresource else {}),
            **({"namespace": own} if own and kind not in CLUSTER_WIDE else {}),
        }
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        said = self.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
        return bool(said["status"].get("allowed"))


@contextlib.contextmanager
def _complaints() -> Iterator[list[str]]:
    """What is logged as an error meanwhile, instead of being printed."""
    said: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger().removeHandler(handler)


def _shared(api: Any) -> Any:
    """The same, with one TLS context for all its connections: each would read the system's certificates anew, 25 ms a
    connection, and a command opens ten at once."""
    import ssl

    from urllib3.util.ssl_ import create_urllib3_context

    how = api.configuration
    context = create_urllib3_context(cert_reqs=ssl.CERT_REQUIRED if how.verify_ssl else ssl.CERT_NONE)
    if how.verify_ssl and not how.ssl_ca_cert:
        context.load_default_certs()
    api.rest_client.pool_manager.connection_pool_kw["ssl_context"] = context
    return api


def refusal(status: int, body: bytes, method: str, path: str, cluster: Cluster) -> ClusterError:
    """What the server said no with, as an error of ours."""
    try:
        said = json.loads(body)
        message = str(said.get("message") or said)
    except (ValueError, AttributeError):
        message = body.decode(errors="replace").strip()[:300]
    where = f"{cluster.name}: {path}"
    if status == 401:
        return ClusterError("the cluster does not know these credentials", uri=cluster.name, fix="Log in again")
    if status == 403:
        return ForbiddenError(message, uri=cluster.name, fix="Ask the cluster's administrator for this permission")
    if status == 404:
        return MissingObjectError(message, uri=where)
    if status in (400, 422):
        return ClusterError(message, uri=where)
    if status == 409:
        return ClusterError(message, uri=where, fix="Run the command again")
    return ClusterError(f"the server answered {status} to {method}: {message}", uri=where)
