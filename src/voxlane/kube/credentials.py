"""How pods come by credentials for buckets: by the name of a Secret or a service account, never by a value."""

from __future__ import annotations

import re
from typing import Any

import pydantic

from voxlane.settings import record

FOLDER = "/voxlane/credentials"
"""Where a Secret's file is mounted."""
_ENDPOINTS = {"s3": "AWS_ENDPOINT_URL", "gs": "STORAGE_EMULATOR_HOST", "az": "AZURE_STORAGE_ENDPOINT"}
_VARIABLES = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION"),
    "az": (
        "AZURE_STORAGE_ACCOUNT",
        "AZURE_STORAGE_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_CLIENT_ID",
        "AZURE_CLIENT_SECRET",
        "AZURE_TENANT_ID",
    ),
    "gs": (),
}
NAME = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
KEY = r"^[-A-Za-z0-9_.]{1,253}$"
SERVER = r"^https?://[^/\s@]+[^\s@]*$"
"""Of what is named here; also in the schema of StagedDataset, so that no server keeps a value given instead."""


@record
class Credentials:
    """Where a pod finds them. All empty: the node's or the cluster's own identity."""

    secret: str | None = None
    """A Secret of the same namespace, whose keys are environment variables: AWS_ACCESS_KEY_ID and
    AWS_SECRET_ACCESS_KEY, AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY."""
    file: str | None = None
    """A key of the Secret that is a Google service account's JSON file, such as key.json."""
    service_account: str | None = None
    """A service account whose cloud identity (workload identity, IRSA) may read and write the buckets."""
    endpoint: str | None = None
    """Server of an S3-compatible store or an emulator."""

    @pydantic.field_validator("secret", "service_account")
    @classmethod
    def _is_name(cls, value: str | None) -> str | None:
        if value is not None and not re.match(NAME, value):
            # Not shown: it may be the secret itself.
            raise ValueError("this is no name of an object in the cluster; give that of a Secret, never its value")
        return value

    @pydantic.field_validator("file")
    @classmethod
    def _is_key(cls, value: str | None) -> str | None:
        if value is not None and not re.match(KEY, value):
            raise ValueError("this is no key of a Secret; give its name, such as key.json")
        return value

    @pydantic.field_validator("endpoint")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is not None and not re.match(SERVER, value):
            raise ValueError("this is no server; give it as https://HOST:PORT, without credentials")
        return value

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> Credentials:
        if self.file and not self.secret:
            raise ValueError(f"file: {self.file} is a key of a Secret; name that as `secret`")
        return self

    def variables(self, *schemes: str) -> list[str]:
        """Environment variables that a Secret for URIs of these schemes may hold (all where none is named)."""
        return [name for scheme in sorted(schemes or _VARIABLES) for name in _VARIABLES.get(scheme, ())]

    def pod_parts(self, *schemes: str) -> dict[str, list[dict[str, Any]]]:
        """`env`, `envFrom` and `volumeMounts` of a container and `volumes` of its pod, for URIs of these schemes (all
        where none is named)."""
        env: list[dict[str, Any]] = []
        parts: dict[str, list[dict[str, Any]]] = {"env": env, "envFrom": [], "volumeMounts": [], "volumes": []}
        if self.endpoint:
            env += [
                {"name": _ENDPOINTS[s], "value": self.endpoint}
                for s in sorted(schemes or _ENDPOINTS)
                if s in _ENDPOINTS
            ]
        if self.secret and self.file:
            env.append({"name": "GOOGLE_APPLICATION_CREDENTIALS", "value": f"{FOLDER}/{self.file}"})
            parts["volumeMounts"].append({"name": "credentials", "mountPath": FOLDER, "readOnly": True})
            only = [{"key": self.file, "path": self.file}]
            parts["volumes"].append({"name": "credentials", "secret": {"secretName": self.secret, "items": only}})
        elif self.secret:
            parts["envFrom"].append({"secretRef": {"name": self.secret}})
        return parts
