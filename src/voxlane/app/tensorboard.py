"""A TensorBoard in the cluster: it reads the run's bucket, and nothing of the pods that train. Pure."""

from __future__ import annotations

from voxlane.app import pod
from voxlane.app.config import BOARD, App, Resources
from voxlane.app.pod import Manifest, Target
from voxlane.errors import ConfigError

PORT = 6006
"""On the pod's own loopback: whoever may forward a port to the pod may see it, and nobody else."""
_ASKED = Resources(cpu="250m", memory="2Gi")
_ANSWERS = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{PORT}/', timeout=5)"


def name(app: App) -> str:
    """Of the Deployment: the app's own where the app is a TensorBoard."""
    return app.name if app.template == "tensorboard" else f"{app.name}-{BOARD}"


def render(target: Target) -> Manifest:
    """The Deployment."""
    app = target.app
    if app.run_uri is None:
        raise ConfigError("run: the app names none, so that there is nothing to show", fix="Give run: gs://BUCKET/RUN")
    made, mounts = pod.volumes(target, data=False, files=False)
    ready = {"exec": {"command": ["python3", "-c", _ANSWERS]}, "periodSeconds": 5, "timeoutSeconds": 10}
    one = {
        **pod.container(target, BOARD),
        "command": ["voxlane", "tensorboard", app.run_uri, "--port", str(PORT), "--no-open", "--wait"],
        "readinessProbe": ready,
        "resources": pod.requests(app, _ASKED, devices=False),
        **({"volumeMounts": mounts} if mounts else {}),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": pod.metadata(target, name(app), pod.labels(app, BOARD)),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": pod.own(app, BOARD)},
            "template": {
                "metadata": {"labels": pod.labels(app, BOARD) | pod.identity_labels(app)},
                "spec": {
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "terminationGracePeriodSeconds": 10,
                    **pod.identity(app),
                    "containers": [one],
                    **({"volumes": made} if made else {}),
                },
            },
        },
    }
