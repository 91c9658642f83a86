"""Every error voxlane raises, in one tree.

    VoxlaneError
    ├── ConfigError               a wrong argument, config field or URI (also a ValueError)
    ├── MissingExtraError         an optional dependency is not installed (also an ImportError)
    ├── StoreError                a bucket said no
    │   ├── NotFoundError         the object does not exist (also a FileNotFoundError)
    │   │   └── BucketNotFoundError
    │   ├── PermissionDeniedError these credentials may not do this (also a PermissionError)
    │   ├── CredentialsError      no credentials, or none the service accepts
    │   ├── AlreadyExistsError    create-only write to a key that exists (also a FileExistsError)
    │   ├── ChangedError          the object is not the version that was asked for
    │   ├── RangeError            a byte range outside the object
    │   ├── UnsupportedError      this service has no such operation
    │   └── UnavailableError      still failing when the retry deadline passed
    ├── DatasetError
    │   ├── EmptyError            nothing matched
    │   ├── DecodeError           the user's decode raised on one object
    │   ├── PairError             zipped datasets do not line up
    │   └── StateError            a saved state belongs to another dataset
    ├── CacheError                a folder on the local disk cannot be used
    │   ├── NoRoomError           the disk has too little room
    │   └── TooLargeError         more bytes than were allowed
    ├── CheckpointError
    │   ├── IncompleteError       the checkpoint was never published, or a file of it is gone
    │   ├── CorruptError          stored bytes are not those that were written
    │   ├── UnsafeError           reading it would run code from the file
    │   ├── MismatchError         the checkpoint does not fit the model
    │   └── BusyError             the save before is still running
    ├── VolumeError
    │   ├── ScanError             a file or series is no readable 3D scan
    │   ├── LayoutError           no dataset that we know is here
    │   ├── BadCasesError         cases that cannot be trained on
    │   └── PreparedError         a prepared dataset is unfinished, damaged, or another than expected
    ├── RunError                  a training run exists already, is not there, or cannot go on
    │   ├── NoMemoryError         a device or machine has too little memory for what was asked of it
    │   └── StoppedError          told to stop; what was saved is kept
    ├── ClusterError              a cluster cannot be reached, or has too little for what was asked of it
    │   ├── LostError             workers, a machine or the head of a cluster went away
    │   ├── ForbiddenError        this user may not do this on the cluster (also a PermissionError)
    │   ├── MissingObjectError    the cluster has no such object, or no such kind of object
    │   └── NotRunningError       what was asked of an app needs it running, and it is not
    ├── ManifestError             a manifest does not fit its kind's schema
    ├── BuildError                an image could not be built or pushed
    └── TuneError                 a search cannot start or go on, or found nothing

Every class can be built from one string, because a DataLoader worker's exception is rebuilt in the parent
from its type and its text.
"""

from __future__ import annotations


class VoxlaneError(Exception):
    """Something failed; `uri` names the thing (may be empty) and `fix` says what to do next (may be empty)."""

    def __init__(self, message: str, *, uri: str = "", fix: str = "") -> None:
        text = f"{uri}: {message}" if uri else message
        if fix:
            text = f"{text.rstrip('.')}. {fix}"
        super().__init__(text)
        self.uri = uri
        self.fix = fix


class ConfigError(VoxlaneError, ValueError):
    """A wrong argument, config field or URI."""


class MissingExtraError(VoxlaneError, ImportError):
    """An optional dependency is not installed."""

    @classmethod
    def of(cls, extra: str, needed_for: str) -> MissingExtraError:
        """The error for `needed_for` when the packages of `extra` are missing."""
        return cls(f"{needed_for} needs packages that are not installed", fix=f"Run: pip install 'voxlane[{extra}]'")


class StoreError(VoxlaneError):
    """A bucket said no."""


class NotFoundError(StoreError, FileNotFoundError):
    """The object does not exist."""


class BucketNotFoundError(NotFoundError):
    """The bucket does not exist."""


class PermissionDeniedError(StoreError, PermissionError):
    """These credentials may not do this."""


class CredentialsError(StoreError):
    """No credentials were found, or the service did not accept them."""


class AlreadyExistsError(StoreError, FileExistsError):
    """A create-only write met a key that exists."""


class ChangedError(StoreError):
    """The object is not the version that was asked for."""


class RangeError(StoreError):
    """A byte range lies outside the object."""


class UnsupportedError(StoreError):
    """This service has no such operation."""


class UnavailableError(StoreError):
    """The service was still failing when the retry deadline passed."""


class DatasetError(VoxlaneError):
    """A dataset cannot give what was asked of it."""


class EmptyError(DatasetError):
    """Nothing matched."""


class DecodeError(DatasetError):
    """The user's decode raised on one object."""


class PairError(DatasetError):
    """Zipped datasets do not line up by key."""


class StateError(DatasetError):
    """A saved state belongs to another dataset."""


class CacheError(VoxlaneError):
    """A folder on the local disk cannot be used."""


class NoRoomError(CacheError):
    """The disk has `lacking_bytes` too little room."""

    def __init__(self, message: str, *, uri: str = "", fix: str = "", lacking_bytes: int = 0) -> None:
        super().__init__(message, uri=uri, fix=fix)
        self.lacking_bytes = lacking_bytes


class TooLargeError(CacheError):
    """What is to be kept there is larger than was allowed."""


class CheckpointError(VoxlaneError):
    """A checkpoint cannot be written or read."""


class IncompleteError(CheckpointError):
    """The checkpoint was never published, or a file of it is gone."""


class CorruptError(CheckpointError):
    """Stored bytes are not those that were written."""


class UnsafeError(CheckpointError):
    """Reading it would run code from the file, which nobody allowed."""


class MismatchError(CheckpointError):
    """The checkpoint does not fit the model."""


class BusyError(CheckpointError):
    """The save before is still running."""


class VolumeError(VoxlaneError):
    """A scan or a prepared dataset cannot be used."""


class ScanError(VolumeError):
    """A file or series is no readable 3D scan."""


class LayoutError(VolumeError):
    """No dataset that we know is here."""


class BadCasesError(VolumeError):
    """Cases that cannot be trained on."""


class PreparedError(VolumeError):
    """A prepared dataset is unfinished, damaged, or another than expected."""


class RunError(VoxlaneError):
    """A training run exists already, is not there, or cannot go on."""


class NoMemoryError(RunError):
    """A device or machine has too little memory for what was asked of it."""


class StoppedError(RunError):
    """A run was told to stop; what was saved is kept."""


class ClusterError(VoxlaneError):
    """A cluster cannot be reached, or has too little for what was asked of it."""


class LostError(ClusterError):
    """Workers, a machine or the head of a cluster went away; what was saved is kept."""


class ForbiddenError(ClusterError, PermissionError):
    """This user may not do this on the cluster."""


class MissingObjectError(ClusterError):
    """The cluster has no such object, or no such kind of object."""


class NotRunningError(ClusterError):
    """What was asked of an app needs it running, and it is not."""


class ManifestError(VoxlaneError):
    """A manifest does not fit its kind's schema."""


class BuildError(VoxlaneError):
    """An image could not be built or pushed."""


class TuneError(VoxlaneError):
    """A search cannot start or go on, or found nothing."""
