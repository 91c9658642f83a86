"""The table of commands, from which the top-level help and the lazy loading of commands are made.

A command is `name: (module of voxlane.cli and function, summary)`. The summary is the first line of the function's
docstring. A command that has subcommands names its help text instead of a function; the names of its subcommands start
with its own name.
"""

from __future__ import annotations

COMMANDS: dict[str, tuple[str, str]] = {
    "prepare": ("segmentation:prepare_dataset", "Check scans and write them as a dataset to train on"),
    "train": ("segmentation:train_network", "Train a segmentation network on a prepared dataset"),
    "evaluate": ("segmentation:evaluate_runs", "Score a run on the cases it did not train on"),
    "predict": ("segmentation:predict_scans", "Segment new scans"),
    "report": ("segmentation:write_report", "Write one page about a run: curves, scores, overlays, timing"),
    "tune": ("segmentation:tune_config", "Search for the best config with many training runs at once"),
    "stage": ("stage:stage_dataset", "Copy a dataset to this machine's own disk"),
    "slurm": ("slurm:HELP", "Run commands as SLURM jobs"),
    "slurm submit": ("slurm:submit_job", "Submit a voxlane command as a job"),
    "slurm render": ("slurm:render_job", "Print the batch script of a voxlane command's job"),
    "slurm status": ("slurm:print_status", "Show your jobs: state, reason for waiting, progress"),
    "slurm logs": ("slurm:print_logs", "Print the log of a job"),
    "slurm cancel": ("slurm:cancel_jobs", "Cancel jobs; their checkpoints and results stay"),
    "app": ("app:HELP", "Run a training app on Kubernetes"),
    "app init": ("app:init_app", "Create the folder of an app from a template"),
    "app templates": ("app:list_templates", "List the templates that `voxlane app init` offers"),
    "app fields": ("app:list_fields", "List the fields of app.yaml, with their defaults"),
    "app build": ("app:build_app", "Build and push the app's image"),
    "app render": ("app:render_app", "Print the app's manifests"),
    "app update": ("app:update_app", "Merge a template's changes into an app"),
    "app deploy": ("app_cluster:deploy_app", "Start an app in the cluster"),
    "app status": ("app_cluster:print_status", "Show the state of an app, and why it is not running"),
    "app logs": ("app_cluster:print_logs", "Print the output of an app's pods"),
    "app events": ("app_cluster:print_events", "Print the cluster's events about an app"),
    "app exec": ("app_cluster:exec_command", "Run a command in one of an app's pods"),
    "app tensorboard": ("app_cluster:show_tensorboard", "Show TensorBoard of an app's run at a local port"),
    "app undeploy": ("app_cluster:undeploy_app", "Remove everything that an app created in the cluster"),
    "app entry": ("app:run_entry", "Run a command as the first process of a container"),
    "operator": ("operator:HELP", "Stage datasets onto nodes' disks in a cluster"),
    "operator install": ("operator:install_operator", "Install the operator, and the kind StagedDataset, in a cluster"),
    "operator uninstall": ("operator:uninstall_operator", "Remove the operator from a cluster"),
    "operator run": ("operator:run_operator", "Run the operator until SIGTERM or Ctrl-C"),
    "operator agent": ("operator:HELP", "Commands that the operator's pods run"),
    "operator agent stage": ("operator:stage_on_node", "Copy a dataset to this node, for the operator"),
    "operator agent remove": ("operator:remove_from_node", "Remove a dataset from this node, for the operator"),
    "tensorboard": ("segmentation:show_tensorboard", "Show a run in TensorBoard"),
    "checkpoint": ("checkpoint:HELP", "List, verify, copy, remove and clean up checkpoints"),
    "checkpoint ls": ("checkpoint:list_checkpoints", "List checkpoints, including unfinished ones, oldest first"),
    "checkpoint latest": ("checkpoint:print_latest", "Print the URI of the newest complete checkpoint"),
    "checkpoint verify": (
        "checkpoint:verify_checkpoints",
        "Read every byte of checkpoints and compare with their checksums",
    ),
    "checkpoint rm": ("checkpoint:remove_checkpoints", "Delete a checkpoint, or all but the newest"),
    "checkpoint gc": ("checkpoint:collect_orphans", "Remove unfinished uploads and stray files that killed saves left"),
    "checkpoint cp": ("checkpoint:copy_checkpoint", "Copy a checkpoint to another URI, checking every byte"),
    "bench": ("bench:HELP", "Run benchmarks on your own machines and buckets"),
    "bench checkpoint": ("bench:measure_checkpoint", "Save and load checkpoints of a demo model"),
    "bench loading": ("bench:measure_loading", "Load data as training does, and report what it waits for"),
    "bench scaling": ("bench:measure_scaling", "Measure how training or a search speeds up with more workers"),
    "bench simulate": ("bench:simulate_loading", "Simulate loading on up to thousands of nodes"),
    "bench step": ("bench:measure_step", "Time one training step on this device, in several variants"),
    "ls": ("storage:list_bucket", "List the objects under a URI, or save them as a manifest"),
    "clean": ("storage:clean_bucket", "Remove temporary objects that killed runs left in a GCS bucket"),
    "completion": ("completion:print_completion", "Print a script that completes commands in your shell"),
    "emulator": ("storage:run_emulator", "Serve a local, in-memory GCS and S3 (needs voxlane[testing])"),
}
HIDDEN = frozenset({"app entry", "operator agent"})
"""Commands that containers run and no help lists."""
