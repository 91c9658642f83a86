"""How pods get credentials for buckets: from a named Secret or service account, never from a value in a manifest."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Any

import pydantic

from voxlane.settings import record

FOLDER = "/voxlane/credentials"
"""Folder in which a Secret's file is mounted."""
_ENDPOINTS = {"s3": "AWS_ENDPOINT_URL", "gs": "STORAGE_EMULATOR_HOST", "az": "AZURE_STORAGE_ENDPOINT"}
_VARIABLES = {
    "s3": (
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION"),
        "AWS_ENDPOINT_URL",
    ),
    "az": (
        *("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN"),
        *("AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_TENANT_ID"),
    ),
    "gs": (),
}
"""Variables that the stores read, by the scheme of the URI. A copier gets no others of a tenant's Secret: PYTHONPATH or
LD_PRELOAD would run code in it."""
REQUIRED_VARIABLES = {"s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "az": ("AZURE_STORAGE_ACCOUNT",)}
"""Variables that a Secret must have, by the scheme of the URI."""
NAME = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
KEY = r"^[-A-Za-z0-9_.]{1,253}$"
SERVER = r"^https?://[^/\s@]+[^\s@]*$"
"""Patterns of the names below. The schema of StagedDataset has them too, so that no server stores a secret value that
was given in place of a name."""


def matching(pattern: str | re.Pattern[str], expected: str, *, hidden: bool = False) -> pydantic.AfterValidator:
    """Return a validator of text; its error does not show a `hidden` value, because it may be the secret itself."""

    def check(value: str) -> str:
        if not re.match(pattern, value):
            raise ValueError(f"not {expected}" if hidden else f"{value!r} is not {expected}")
        return value

    return pydantic.AfterValidator(check)


_NAME_ERROR = "a valid name of an object in the cluster; give the name of a Secret, never its value"
_KEY_ERROR = "a valid key of a Secret; give the name of a key, such as key.json"
_URL_ERROR = "a valid URL; give it as https://HOST:PORT, without credentials"
ObjectName = Annotated[str, matching(NAME, _NAME_ERROR, hidden=True)]
SecretKey = Annotated[str, matching(KEY, _KEY_ERROR, hidden=True)]
ServerUrl = Annotated[str, matching(SERVER, _URL_ERROR, hidden=True)]


@record
class Credentials:
    """Credentials of pods for buckets. Without any field, pods use the identity of the node or the cluster."""

    secret: ObjectName | None = None
    """Name of a Secret in the same namespace whose keys are environment variables: AWS_ACCESS_KEY_ID and
    AWS_SECRET_ACCESS_KEY, or AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY. Pods that stage data get no others."""
    file: SecretKey | None = None
    """Key of the Secret that holds the JSON file of a Google service account, such as key.json."""
    service_account: ObjectName | None = None
    """Name of a service account whose cloud identity (workload identity, IRSA) may read and write the buckets."""
    endpoint: ServerUrl | None = None
    """URL of an S3-compatible store or an emulator."""

    @pydantic.model_validator(mode="after")
    def _check_consistency(self) -> Credentials:
        if self.file and not self.secret:
            raise ValueError(f"file: {self.file} is a key of a Secret; name the Secret as `secret`")
        return self

    def variables(self, *schemes: str) -> list[str]:
        """Return the environment variables that a Secret for URIs of these schemes (default: all) may hold."""
        return [name for scheme in sorted(schemes or _VARIABLES) for name in _VARIABLES.get(scheme, ())]

    def pod_parts(self, *schemes: str) -> dict[str, list[dict[str, Any]]]:
        """Return `env`, `envFrom`, `volumeMounts` and `volumes` of a pod for URIs of these schemes (default: all)."""
        env: list[dict[str, Any]] = []
        parts: dict[str, list[dict[str, Any]]] = {"env": env, "envFrom": [], "volumeMounts": [], "volumes": []}
        if self.endpoint:
            variables = [_ENDPOINTS[scheme] for scheme in sorted(schemes or _ENDPOINTS) if scheme in _ENDPOINTS]
            env += [{"name": name, "value": self.endpoint} for name in variables]
        if self.secret and self.file:
            env.append({"name": "GOOGLE_APPLICATION_CREDENTIALS", "value": f"{FOLDER}/{self.file}"})
            parts["volumeMounts"].append({"name": "credentials", "mountPath": FOLDER, "readOnly": True})
            items = [{"key": self.file, "path": self.file}]
            parts["volumes"].append({"name": "credentials", "secret": {"secretName": self.secret, "items": items}})
        elif self.secret:
            parts["envFrom"].append({"secretRef": {"name": self.secret}})
        return parts

    def allowed_pod_parts(self, scheme: str) -> dict[str, list[dict[str, Any]]]:
        """Return `pod_parts` for URIs of a scheme, with only the variables of the Secret that the stores read."""
        parts = self.pod_parts(scheme)
        parts["envFrom"] = []
        if self.secret and not self.file:
            names = {variable["name"] for variable in parts["env"]}
            parts["env"] += self.list_secret_variables(scheme, required=True, exclude=names)
        return parts

    def list_secret_variables(
        self, *schemes: str, required: bool = False, exclude: Collection[str] = ()
    ) -> list[dict[str, Any]]:
        """Return a variable for each key that the Secret for URIs of these schemes (default: all) may hold, except
        those in `exclude`. With `required`, a pod does not start without the keys that the stores cannot do without."""
        needed = {name for scheme in schemes for name in REQUIRED_VARIABLES.get(scheme, ())} if required else set()
        variables = []
        for name in self.variables(*schemes):
            if name not in exclude:
                optional = {} if name in needed else {"optional": True}
                reference = {"name": self.secret, "key": name, **optional}
                variables.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
        return variables
