"""All errors that voxlane raises, in one tree.

    VoxlaneError
    ├── ConfigError (also a ValueError), UsageError, MissingExtraError (also an ImportError)
    ├── StoreError: ChangedError, CredentialsError, InvalidKeyError, RangeError, UnavailableError, UnsupportedError
    │   ├── NotFoundError (also a FileNotFoundError): BucketNotFoundError
    │   ├── PermissionDeniedError (also a PermissionError)
    │   ├── AlreadyExistsError (also a FileExistsError)
    │   └── ClosedWriterError (also a ValueError)
    ├── DatasetError: EmptyError, DecodeError, PairError, StateError
    ├── CacheError: NoRoomError (OverQuotaError), TooLargeError
    ├── CheckpointError: IncompleteError, CorruptError, UnsafeError, MismatchError, BusyError
    ├── VolumeError: ScanError, LayoutError, BadCasesError, PreparedError
    ├── RunError: NoMemoryError, ReportedError, StoppedError
    ├── ImportedModelError
    ├── LeaseError
    ├── ClusterError: LostError, ForbiddenError (also a PermissionError), MissingObjectError, NotRunningError,
    │   DryRunUnsupportedError
    └── ManifestError, BuildError, TuneError

Every class can be constructed from one string, because torch rebuilds the exception of a DataLoader worker in the
parent from its type and text.
"""

from __future__ import annotations

from voxlane.redaction import redact_text, redact_urls


class VoxlaneError(Exception):
    """Base of all errors; `uri` names the object concerned and `fix` says what to do next (either may be empty).

    Secrets that the message repeats, such as the password in a URL, are redacted.
    """

    def __init__(self, message: str, *, uri: str = "", fix: str = "") -> None:
        uri, message = redact_urls(uri), redact_text(message)
        text = f"{uri}: {message}" if uri else message
        if fix:
            text = f"{text.rstrip('.')}. {redact_text(fix)}"
        super().__init__(text)
        self.message = message
        self.uri = uri
        self.fix = fix


class DiscardedWarning(UserWarning):
    """Given when a writer that nobody closed is thrown away with what was written to it."""


class ConfigError(VoxlaneError, ValueError):
    """Raised for a wrong argument, config field or URI."""

    code = ""
    """Pydantic's name of the problem with a field, such as int_parsing, where it found one."""


class UsageError(VoxlaneError):
    """Raised when the words of a command line do not fit the command; the exit status is 2."""


class MissingExtraError(VoxlaneError, ImportError):
    """Raised when an optional dependency is not installed."""

    @classmethod
    def of(cls, extra: str, needed_for: str, *, uri: str = "") -> MissingExtraError:
        """Return the error for `needed_for` if the packages of `extra` are missing. `uri`: the only object that needs
        them."""
        problem, fix = f"{needed_for} needs packages that are not installed", f"Run: pip install 'voxlane[{extra}]'"
        return cls(problem, uri=uri, fix=fix)


class StoreError(VoxlaneError):
    """Raised when a request to a bucket failed."""


class NotFoundError(StoreError, FileNotFoundError):
    """Raised when the object does not exist."""


class BucketNotFoundError(NotFoundError):
    """Raised when the bucket does not exist."""


class PermissionDeniedError(StoreError, PermissionError):
    """Raised when the credentials lack a permission."""


class CredentialsError(StoreError):
    """Raised when no credentials were found, or the service did not accept them."""


class AlreadyExistsError(StoreError, FileExistsError):
    """Raised when a create-only write found an existing key."""


class ClosedWriterError(StoreError, ValueError):
    """Raised when a writer is used after it was closed or aborted."""


class ChangedError(StoreError):
    """Raised when the object is not the requested version."""


class InvalidKeyError(StoreError):
    """Raised when a store cannot address a key."""


class RangeError(StoreError):
    """Raised when a byte range lies outside the object."""


class UnsupportedError(StoreError):
    """Raised when the service does not support the operation."""


class DamagedError(StoreError):
    """Raised when the bytes of an object differ from the service's checksum, however often they are read."""


class UnavailableError(StoreError):
    """Raised when the service was still failing at the retry deadline."""


class DatasetError(VoxlaneError):
    """Base of the errors of datasets."""


class EmptyError(DatasetError):
    """Raised when no object matches."""


class DecodeError(DatasetError):
    """Raised when the user's decode function raised on an object."""


class PairError(DatasetError):
    """Raised when the keys of zipped datasets do not match."""


class StateError(DatasetError):
    """Raised when a saved state belongs to another dataset."""


class CacheError(VoxlaneError):
    """Raised when a folder on the local disk cannot be used."""


class NoRoomError(CacheError):
    """Raised when the disk lacks `lacking_bytes` of free space."""

    def __init__(self, message: str, *, uri: str = "", fix: str = "", lacking_bytes: int = 0) -> None:
        super().__init__(message, uri=uri, fix=fix)
        self.lacking_bytes = lacking_bytes


class OverQuotaError(NoRoomError):
    """Raised when copies would exceed their quota by `lacking_bytes`."""


class TooLargeError(CacheError):
    """Raised when the data is larger than the allowed size."""


class CheckpointError(VoxlaneError):
    """Raised when a checkpoint cannot be written or read."""


class IncompleteError(CheckpointError):
    """Raised when the checkpoint was never published, or a file of it is gone."""


class CorruptError(CheckpointError):
    """Raised when stored bytes are not those that were written."""


class UnsafeError(CheckpointError):
    """Raised when reading the checkpoint could run code from the file."""


class MismatchError(CheckpointError):
    """Raised when the checkpoint does not fit the model."""


class BusyError(CheckpointError):
    """Raised when the previous save is still running."""


class VolumeError(VoxlaneError):
    """Raised when a scan or a prepared dataset cannot be used."""


class ScanError(VolumeError):
    """Raised when a file or series is not a readable 3D scan."""


class LayoutError(VolumeError):
    """Raised when no supported dataset layout was recognised."""


class BadCasesError(VolumeError):
    """Raised when some cases cannot be used for training."""


class PreparedError(VolumeError):
    """Raised when a prepared dataset is unfinished, damaged or not the expected one."""


class RunError(VoxlaneError):
    """Raised when a training run exists already, does not exist, or cannot continue."""


class NoMemoryError(RunError):
    """Raised when a device or machine has too little memory."""


class ReportedError(RunError):
    """Raised on other ranks for an error that rank 0 reports, so that it is printed once."""


class StoppedError(RunError):
    """Raised when a run was stopped; its checkpoints remain."""


class ImportedModelError(VoxlaneError):
    """Raised when a model of another program cannot be imported."""


class LeaseError(VoxlaneError):
    """Raised when another process writes the same run, search or prepared dataset."""


class ClusterError(VoxlaneError):
    """Raised when a cluster cannot be reached, or lacks resources. `status` is the HTTP status of the API server's
    response; None if there was no response."""

    def __init__(self, message: str, *, uri: str = "", fix: str = "", status: int | None = None) -> None:
        super().__init__(message, uri=uri, fix=fix)
        self.status = status


class LostError(ClusterError):
    """Raised when workers, a machine or the head of a cluster were lost; checkpoints remain."""


class ForbiddenError(ClusterError, PermissionError):
    """Raised when the user lacks a permission on the cluster."""


class MissingObjectError(ClusterError):
    """Raised when the cluster has no such object or kind of object."""


class NotRunningError(ClusterError):
    """Raised when an operation needs a running app."""


class DryRunUnsupportedError(ClusterError):
    """Raised when an admission webhook of the cluster cannot check an object without creating it."""


class ManifestError(VoxlaneError):
    """Raised when a manifest does not match the schema of its kind."""


class BuildError(VoxlaneError):
    """Raised when an image could not be built or pushed."""


class TuneError(VoxlaneError):
    """Raised when a search cannot start or continue, or has no result."""
