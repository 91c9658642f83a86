"""`dataflux_pytorch.lightning.path_utils`: paths of objects in GCS."""

from __future__ import annotations

from pathlib import Path

from voxlane import uri as uris
from voxlane.errors import ConfigError


def process_input_path(path: str | Path) -> str:
    """Return a path as text; a URI that lost a slash in `pathlib` gets it back."""
    if not isinstance(path, str | Path):
        raise TypeError(f"expected a string or a pathlib.Path, got {type(path).__name__}")
    return path if isinstance(path, str) else uris.from_path(path)


def parse_gcs_path(path: str | Path) -> tuple[str, str]:
    """Return the bucket and the object name of a path that begins with gs:// or gcs://. The name may be empty. Raises
    ConfigError, a ValueError, for any other path."""
    text = process_input_path(path)
    if not text.startswith(("gs://", "gcs://")):
        raise ConfigError(f"the path {text!r} does not begin with gs:// or gcs://", fix="Write gs://BUCKET/NAME")
    parsed = uris.parse(text)
    return parsed.bucket, parsed.key
