"""A Kubernetes API server: objects are plain dicts, errors are ClusterErrors that name the object and the fix.

Paths are the server's own (`/api/v1/namespaces/NS/pods`); `path_of` builds one. The `kubernetes` package reads
kubeconfig and the pod's own credentials and keeps the connections; its models are not used, because they take a second
to load for hundreds of pods and do not know custom resources.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import ssl
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import yaml

from voxlane.errors import ClusterError, DryRunUnsupportedError, ForbiddenError, MissingExtraError, MissingObjectError

Object = dict[str, Any]
Query = Mapping[str, Any] | None
_TIMEOUT_S = 30.0
_CONNECT_TIMEOUT_S = 5.0
_PAGE_SIZE = 500
_MAX_CONNECTIONS = 64
FIELD_MANAGER = "voxlane"
_JSON = "application/json"

CLUSTER_WIDE = {
    *("ClusterRole", "ClusterRoleBinding", "ClusterTrainingRuntime", "CustomResourceDefinition", "Namespace", "Node"),
    "PersistentVolume",
}


def path_of(api_version: str, kind: str, namespace: str | None = None, name: str | None = None) -> str:
    """Return the server's path of a kind (to list or create objects) or, with `name`, of one object."""
    scope = f"/namespaces/{quote(namespace)}" if namespace and kind not in CLUSTER_WIDE else ""
    return f"{_group_path(api_version)}{scope}/{plural_of(kind)}" + (f"/{quote(name)}" if name else "")


def path_of_object(manifest: Mapping[str, Any], namespace: str | None = None) -> str:
    """Return the server's path of the object that a manifest describes."""
    metadata = manifest["metadata"]
    return path_of(manifest["apiVersion"], manifest["kind"], metadata.get("namespace", namespace), metadata["name"])


def plural_of(kind: str) -> str:
    """Return the name of a kind in paths. All kinds that voxlane uses have regular plurals."""
    return f"{kind.lower()}s"


def _group_path(api_version: str) -> str:
    return f"/api/{api_version}" if "/" not in api_version else f"/apis/{api_version}"


class Cluster:
    """A connection to a cluster; `name` is the name of the kubeconfig's context, for messages."""

    def __init__(self, api: Any, *, namespace: str, name: str) -> None:
        self._api = api
        self.namespace = namespace
        self.name = name

    @classmethod
    def connect(cls, *, context: str | None = None, namespace: str | None = None) -> Cluster:
        """Configure a connection as kubectl does: from KUBECONFIG or ~/.kube/config, or inside a pod from its service
        account. Nothing is sent yet."""
        try:
            from kubernetes import config as kubeconfig
            from kubernetes.client import ApiClient, Configuration
        except ImportError:
            raise MissingExtraError.of("kubernetes", "Kubernetes") from None
        settings = Configuration()
        settings.retries = 2
        settings.connection_pool_maxsize = _MAX_CONNECTIONS
        path = os.environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")
        try:
            if context is None and "KUBECONFIG" not in os.environ and "KUBERNETES_SERVICE_HOST" in os.environ:
                kubeconfig.load_incluster_config(client_configuration=settings)
                own_namespace = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text().strip()
                return cls(_share_tls(ApiClient(settings)), namespace=namespace or own_namespace, name="in-cluster")
            # The path is passed because the package reads KUBECONFIG only once, when it is imported.
            with _capture_logged_errors() as logged_errors:
                kubeconfig.load_kube_config(config_file=path, context=context, client_configuration=settings)
            contexts, active = kubeconfig.list_kube_config_contexts(config_file=path)
        except (kubeconfig.ConfigException, OSError, yaml.YAMLError) as error:
            reason = "the file is not YAML" if isinstance(error, yaml.YAMLError) else str(error).splitlines()[0]
            fix = "Set KUBECONFIG or --context to a cluster that kubectl reaches"
            raise ClusterError(f"no cluster is configured: {reason}", uri=path, fix=fix) from None
        if logged_errors and not settings.api_key and not settings.cert_file:
            # The package continues without credentials, and the server would refuse every request as anonymous.
            message = f"the program that provides credentials failed: {logged_errors[0]}"
            raise ClusterError(message, uri=path, fix="Log in again, or install it")
        if not settings.verify_ssl:  # as the user's kubeconfig says; kubectl does not warn either
            import urllib3

            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        selected = next((entry for entry in contexts if entry["name"] == context), active) if context else active
        own_namespace = selected.get("context", {}).get("namespace") or "default"
        return cls(_share_tls(ApiClient(settings)), namespace=namespace or own_namespace, name=selected["name"])

    # -- requests ------------------------------------------------------------------------------------------------------

    def request(
        self, method: str, path: str, body: Any = None, *, query: Query = None, content_type: str = _JSON
    ) -> Object:
        """Return the server's response as plain data. Raise MissingObjectError if the object does not exist and
        ForbiddenError if the user may not access it; both are ClusterErrors."""
        with self._send(method, path, body, query, content_type, _TIMEOUT_S) as response:
            result: Object = json.loads(response.data or b"{}")
        return result

    def stream(self, path: str, *, query: Query = None, timeout_s: float | None = None) -> Iterator[bytes]:
        """Yield the response's lines as they arrive, without their line ends; for logs and watches."""
        rest = b""
        with self._send("GET", path, None, query, _JSON, timeout_s) as response:
            for chunk in response.stream(64 * 1024, decode_content=True):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from lines
            if rest:
                yield rest

    def socket(self, path: str, *, query: Sequence[tuple[str, str]] = ()) -> Any:
        """Open a websocket for exec or port-forward; the first byte of each frame is its channel."""
        from kubernetes.stream.ws_client import create_websocket, get_websocket_url
        from websocket import WebSocketBadStatusException, WebSocketException

        headers: dict[str, str] = {}
        self._api.update_params_for_auth(headers, [], ["BearerToken"], path, "GET", None)
        url = get_websocket_url(self._api.configuration.host + path, list(query))
        try:
            lowercase = {name.lower(): value for name, value in headers.items()}
            return create_websocket(self._api.configuration, url, lowercase)
        except WebSocketBadStatusException as error:
            raise translate_response(error.status_code, error.resp_body or b"", "GET", path, self) from None
        except (WebSocketException, OSError) as error:
            raise self._translate_connection_error(error) from None

    def _translate_connection_error(self, error: Exception) -> ClusterError:
        reason, host = getattr(error, "reason", None) or error, self._api.configuration.host
        if isinstance(reason, ssl.SSLError) or "SSL" in type(reason).__name__:
            fix = f"Fetch the credentials of context {self.name} again"
            return ClusterError("kubeconfig does not trust the certificate of the cluster", uri=host, fix=fix)
        fix = f"Check that the cluster of context {self.name} runs and is reachable from here"
        return ClusterError(f"the cluster does not answer: {type(reason).__name__}", uri=host, fix=fix)

    @contextlib.contextmanager
    def _send(
        self, method: str, path: str, body: Any, query: Query, content_type: str, timeout_s: float | None
    ) -> Iterator[Any]:
        """Send a request and yield its response; errors of the connection are ClusterErrors, also while it is read."""
        import urllib3

        url = self._api.configuration.host + path + (f"?{urlencode(query)}" if query else "")
        headers = {"Accept": _JSON, "Content-Type": content_type}
        self._api.update_params_for_auth(headers, [], ["BearerToken"], path, method, None)
        try:
            response = self._api.rest_client.pool_manager.request(
                method,
                url,
                body=None if body is None else json.dumps(body),
                headers=headers,
                timeout=urllib3.Timeout(connect=_CONNECT_TIMEOUT_S, read=timeout_s),
                preload_content=False,
            )
            with contextlib.closing(response):
                if response.status >= 400:
                    raise translate_response(response.status, response.data, method, path, self)
                yield response
        except urllib3.exceptions.HTTPError as error:
            raise self._translate_connection_error(error) from None

    # -- objects -------------------------------------------------------------------------------------------------------

    def get(self, path: str) -> Object:
        """Return one object."""
        return self.request("GET", path)

    def find(self, path: str) -> Object | None:
        """Return one object, or None if it (or its kind) does not exist."""
        try:
            return self.get(path)
        except MissingObjectError:
            return None

    def list(self, path: str, *, labels: str = "", fields: str = "") -> list[Object]:
        """Return the objects of a kind, fetched in pages; [] if the cluster does not have the kind."""
        query = {"limit": str(_PAGE_SIZE), "labelSelector": labels, "fieldSelector": fields}
        objects: list[Object] = []
        while True:
            try:
                page = self.request("GET", path, query=query)
            except MissingObjectError:
                return objects
            kind, version = page["kind"].removesuffix("List"), page["apiVersion"]
            objects += [{"kind": kind, "apiVersion": version, **item} for item in page["items"]]
            if not (token := page["metadata"].get("continue")):
                return objects
            query["continue"] = token

    def create(self, manifest: Mapping[str, Any], *, dry_run: bool = False) -> Object:
        """Create an object and return the server's version of it. Raise ClusterError if it already exists."""
        namespace = manifest["metadata"].get("namespace", self.namespace)
        path = path_of(manifest["apiVersion"], manifest["kind"], namespace)
        return self.request("POST", path, manifest, query=write_query(dry_run=dry_run))

    def apply(self, manifest: Mapping[str, Any]) -> Object:
        """Create an object or change it to match the manifest (server-side apply)."""
        path = path_of_object(manifest, self.namespace)
        query = write_query() | {"force": "true"}
        return self.request("PATCH", path, manifest, query=query, content_type="application/apply-patch+yaml")

    def patch(self, path: str, changes: Mapping[str, Any], *, subresource: str = "") -> Object:
        """Merge `changes` into an object (RFC 7386: null removes a field)."""
        path = f"{path}/{subresource}" if subresource else path
        return self.request("PATCH", path, changes, content_type="application/merge-patch+json")

    def delete(self, path: str, *, foreground: bool = False, grace_s: int | None = None) -> bool:
        """Delete an object and everything it owns; return whether it existed."""
        policy = "Foreground" if foreground else "Background"
        options = {"propagationPolicy": policy, "gracePeriodSeconds": grace_s}
        try:
            self.request("DELETE", path, options)
        except MissingObjectError:
            return False
        return True

    def serves(self, api_version: str, kind: str) -> bool:
        """Return whether the cluster has a kind: the definition of a custom resource may not be installed."""
        resources = self.find(_group_path(api_version))
        return resources is not None and any(resource["kind"] == kind for resource in resources["resources"])

    def may(self, verb: str, api_version: str, kind: str, namespace: str | None = None, subresource: str = "") -> bool:
        """Return whether the server allows this user `verb` on a kind; an empty namespace means all namespaces."""
        namespace = self.namespace if namespace is None else namespace
        attributes = {"verb": verb, "group": api_version.rpartition("/")[0], "resource": plural_of(kind)}
        attributes |= {"subresource": subresource, "namespace": "" if kind in CLUSTER_WIDE else namespace}
        version, kind = "authorization.k8s.io/v1", "SelfSubjectAccessReview"
        review = {"apiVersion": version, "kind": kind, "spec": {"resourceAttributes": attributes}}
        response = self.request("POST", path_of(version, kind), review)
        return bool(response["status"].get("allowed"))


def write_query(*, dry_run: bool = False) -> dict[str, str]:
    """Return the query of a request that writes an object."""
    return {"fieldManager": FIELD_MANAGER, **({"dryRun": "All"} if dry_run else {})}


@contextlib.contextmanager
def _capture_logged_errors() -> Iterator[list[str]]:
    """Collect the messages that are logged as errors inside the block, instead of printing them."""
    messages: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger().removeHandler(handler)


def _share_tls(api: Any) -> Any:
    """Give all connections of a client one TLS context. Otherwise each connection reads the system's certificates
    again, which takes 25 ms, and a command opens ten at once."""
    from urllib3.util.ssl_ import create_urllib3_context

    settings = api.configuration
    context = create_urllib3_context(cert_reqs=ssl.CERT_REQUIRED if settings.verify_ssl else ssl.CERT_NONE)
    if settings.verify_ssl and not settings.ssl_ca_cert:
        context.load_default_certs()
    api.rest_client.pool_manager.connection_pool_kw["ssl_context"] = context
    return api


def translate_response(status: int, body: bytes, method: str, path: str, cluster: Cluster) -> ClusterError:
    """Return the error for a response with an HTTP status of 400 or above."""
    try:
        details = json.loads(body)
        message = str(details.get("message") or details)
    except (ValueError, AttributeError):
        message = body.decode(errors="replace").strip()[:300]
    uri = f"{cluster.name}: {path}"
    if status == 401:
        message = "the cluster does not accept these credentials"
        return ClusterError(message, uri=cluster.name, fix="Log in again", status=status)
    if status == 403:
        fix = "Ask the cluster's administrator for this permission"
        return ForbiddenError(message, uri=cluster.name, fix=fix, status=status)
    if status == 404:
        return MissingObjectError(message, uri=uri, status=status)
    if status == 400 and "does not support dry run" in message:  # the server has no code of its own for this
        return DryRunUnsupportedError(message, uri=uri, status=status)
    if status in (400, 409, 422):
        return ClusterError(message, uri=uri, fix="Run the command again" if status == 409 else "", status=status)
    return ClusterError(f"the server answered {status} to {method}: {message}", uri=uri, status=status)
