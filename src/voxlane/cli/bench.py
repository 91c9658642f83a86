"""`voxlane bench`: benchmarks on the user's own machines and buckets. Their settings are in `voxlane.bench`."""

from __future__ import annotations

import dataclasses

from voxlane.bench.checkpoint.settings import CheckpointSettings
from voxlane.bench.loading.settings import LoadingSettings
from voxlane.bench.report import ResultFile
from voxlane.bench.scaling.settings import ScalingSettings
from voxlane.bench.simulator.settings import SimulatorSettings
from voxlane.bench.step.settings import StepSettings
from voxlane.cli.config_options import StoreOptions
from voxlane.errors import UsageError
from voxlane.settings import record

HELP = "Run benchmarks on your own machines and buckets."


@record
class BenchCheckpointCommand(StoreOptions, CheckpointSettings):
    """Save and load checkpoints of a demo model.

    Save and load the state of a demo transformer, by one or several strategies in turn, and report times and MB/s.

    Strategies:
      voxlane      this package
      fsspec       torch's FsspecWriter and FsspecReader (distributed), torch.save to an fsspec file (single)
      filesystem   torch's own, on a local folder or on a mounted bucket (--mount)

    The loaded values are compared with the saved ones, outside the measured time; a difference fails the run.

    Size of the model: 10 layers 79 MB, 100 layers 311 MB, 1000 layers 2.6 GB, 10000 layers 26 GB.

    Checkpoints are saved below DIR/checkpoints. Before anything is saved, all settings are checked, and the checkpoint
    that --restore names is looked up.

    Environment, where the flag is not given (the variables of Dataflux's benchmarks):
      CKPT_DIR_PATH, CKPT_RESTORE_PATH, ACCELERATOR      --dir, --restore, --accelerator
      NUM_LAYERS, NUM_SAVE_CALLS, NUM_LOAD_CALLS         --layers, --saves, --loads
      NUM_NODES, NUM_DEVICES (auto: all GPUs, or 1)      their product is the number of ranks
      LAYER_SIZE, PADDING_SIZE, SAMPLE_COUNT             --layer-size, --padding-size, both --saves and --loads
      USE_FSSPEC, USE_ASYNC                              --strategy fsspec, --async
      STEPS_PER_SAVE, SIMULATED_WORKLOAD_DURATION        --steps-per-save, --step-time

    Under torchrun, and wherever RANK, WORLD_SIZE and MASTER_ADDR are set, the process takes part as that rank, and
    WORLD_SIZE is the number of ranks. In a JobSet that sets COORDINATOR_ADDRESS, MASTER_PORT, JOB_INDEX,
    JOB_COMPLETION_INDEX and PROCESSES_IN_JOB, as Dataflux's do, the process is that node and starts its own ranks.

    Examples:
      voxlane bench checkpoint --dir gs://bucket/bench --ranks 2 --layers 100
      voxlane bench checkpoint --dir s3://bucket/bench --strategy voxlane --strategy fsspec --format single
      voxlane bench checkpoint --dir gs://bucket/bench --strategy filesystem --mount /mnt/bucket
      voxlane bench checkpoint --save-only --dir gs://bucket/bench --saves 1      prints the checkpoint's URI, for:
      voxlane bench checkpoint --load-only --restore gs://bucket/bench/checkpoints/voxlane-distributed/ckpt-0
      voxlane bench checkpoint --dir gs://bucket/bench --async --steps-per-save 10 --step-time 0.5
      torchrun --nnodes 4 --nproc-per-node 8 -m voxlane bench checkpoint --dir gs://bucket/bench --accelerator cuda
    """

    def _run(self) -> None:
        if self.save_only and self.load_only:
            raise UsageError("voxlane bench checkpoint: --save-only and --load-only exclude each other", fix="Give one")
        settings = dataclasses.replace(self, store=self.store_config())
        result_file = ResultFile(settings.out, settings.store, plot=not settings.no_plot)

        from voxlane.bench.checkpoint import report
        from voxlane.bench.checkpoint.measure import measure

        result = measure(settings)
        if result is None:  # another rank reports
            return
        document = report.build_report(settings, result)
        print(report.format_report(document))
        if settings.format == "single" and settings.num_load_calls:
            print("peak extra memory of a single-file load includes the loaded state itself")
        for uri in result.kept_uris:
            print(f"kept {uri}")
        result_file.save(document, report.draw)


@record
class BenchLoadingCommand(StoreOptions, LoadingSettings):
    """Load data as training does, and report what it waits for.

    Load data as training does, with a sleep in place of the step, and report per epoch and node: time, samples/s, Gbps,
    requests/s, the fraction of time in which no step ran (stall), memory, and the bytes that the server counted, if it
    is voxlane's emulator.

    Modes, by what DATA is:
      patches        DATA is a prepared dataset: ranged reads of the chunks that a patch touches
      whole-object   DATA is raw scans (.npy pairs, or folders that voxlane prepare accepts, in NIfTI): every patch
                     downloads and decodes a whole scan and its label, as the public segmentation demo does

    Give both, raw scans and the dataset prepared from them, to measure them in turns over the same cases in the same
    order, and to compare them.

    Caches (on each node's disk; patches also in memory, as in training):
      none   nothing is kept from one sample to the next
      cold   empty at the start of every epoch
      warm   as the previous epoch left it, as in training from the second epoch on

    Examples:
      voxlane bench loading gs://bucket/prepared --batch 2 --step-time 0.2
      voxlane bench loading gs://bucket/raw gs://bucket/prepared --steps 20 --cache none --cache warm
      voxlane bench loading s3://bucket/raw --listing-only
      voxlane ls gs://bucket/raw/ --save raw.parquet; voxlane bench loading gs://bucket/raw --manifest raw.parquet
      voxlane bench loading gs://bucket/prepared --ranks 4                    four processes of this machine
      voxlane bench loading gs://bucket/prepared --launcher ray --address auto --nodes 8 --ranks 4
      torchrun --nnodes 8 --nproc-per-node 4 -m voxlane bench loading gs://bucket/prepared --out gs://bucket/bench.json
      voxlane slurm submit --nodes 8 -- bench loading gs://bucket/prepared --out /shared/bench.json
    """

    def _run(self) -> None:
        settings = dataclasses.replace(self, store=self.store_config())
        plot = not settings.no_plot and not settings.listing_only
        result_file = ResultFile(settings.out, settings.store, plot=plot)

        from voxlane.bench.loading.measure import measure

        resolved, result = measure(settings)
        if result is None:  # another rank reports
            return

        from voxlane.bench.loading import report

        document = report.build_report(resolved, result)
        print(report.format_report(document), *report.explain(document), sep="\n")
        result_file.save(document, report.draw)


@record
class BenchScalingCommand(StoreOptions, ScalingSettings):
    """Measure how training or a search speeds up with more workers.

    Train on 1, 2, 4, ... workers in turn and report patches/s and efficiency: the speed-up over the smallest number of
    workers, divided by the ratio of the numbers of workers. Start-up time is reported separately. Repetitions alternate
    between the numbers of workers, so that a drift of the machine affects all of them alike.

      weak     the batch of a worker is --batch at any number of workers: the global batch grows with them
      strong   the global batch is --global-batch at any number of workers: each worker's part shrinks

    By default the accelerator is simulated: a step takes --step-time, but the patches come through the real loader, and
    gradients of the real network's sizes are averaged over real ranks while the rest of the step goes on. So there can
    be more workers than processors, and everything except the arithmetic is measured. --real trains for real.

    --trials measures a search: trials of known length, several at once. The efficiency is the sum of their lengths
    divided by (trials at once x makespan).

    Examples:
      voxlane bench scaling                                               1, 2, 4, 8 workers on synthetic data
      voxlane bench scaling gs://bucket/prepared --workers 1,2,4 patch=[96,96,96] base_features=16
      voxlane bench scaling gs://bucket/prepared --real --workers 1,2 --mode strong --target-dice 0.8 epochs=10
      voxlane bench scaling --address auto --workers 8,16,32 --mode weak      on a running Ray cluster
      voxlane bench scaling --trials 8 --concurrent 1,2                   only trials
    """

    def _run(self) -> None:
        settings = dataclasses.replace(self, store=self.store_config())
        result_file = ResultFile(settings.out, settings.store, plot=not settings.no_plot)

        from voxlane.bench.scaling import report
        from voxlane.bench.scaling.measure import measure

        document = report.build_report(settings, *measure(settings))
        print(report.format_report(document))
        result_file.save(document, report.draw)


@record
class BenchSimulateCommand(SimulatorSettings):
    """Simulate loading on up to thousands of nodes.

    Simulate loading on any number of nodes: epoch time, samples/s, egress, requests/s and stall, from the settings of a
    loader, a network and a bucket. The simulation is deterministic for a seed and uses no bucket and no node.

    Without flags: the public segmentation benchmark (32 to 1,024 nodes, whole objects) beside its published table, then
    patches on the same nodes and on 10,000.

      --check RESULT...  simulate measured runs of voxlane bench loading from their own settings and report the error
      --plan --nodes N   for a step time, batch and cluster: how many workers, which cache, what limits, what it costs

    Examples:
      voxlane bench simulate                                                  the public table, and patches
      voxlane bench simulate --mode patches --nodes 8,64,512 --batch 2 --step-time 0.2 --workers 4
      voxlane bench simulate --mode patches --measured loading-bench.json     the cost of a patch, measured on your data
      voxlane bench simulate --check loading-*.json
      voxlane bench simulate --plan --mode patches --nodes 64 --ranks 8 --batch 2 --step-time 0.2 --cores 96

    Sizes are written as 150M or 2Gi.
    """

    def _run(self) -> None:
        if self.check and self.plan:
            raise UsageError("voxlane bench simulate: --check and --plan exclude each other", fix="Give one")
        if self.check != bool(self.results):
            problem = "--check needs result files" if self.check else f"unexpected argument {self.results[0]!r}"
            raise UsageError(f"voxlane bench simulate: {problem}", fix="Give --check RESULT ...")
        result_file = ResultFile(self.out, plot=not self.no_plot)

        from voxlane.bench.simulator import report, study

        if self.check:
            document = study.check(self.results)
        elif self.plan:
            document = study.plan(self)
        else:
            document = study.scale(self)
        print(report.format_report(document))
        result_file.save(document, report.draw)


@record
class BenchStepCommand(StepSettings):
    """Time one training step on this device, in several variants.

    Time one training step (forward, loss, backward, optimizer) in several variants that take turns in one process.
    Report milliseconds, patches/s, memory, start-up time, and how the GPU spends a step. This needs no data and no
    bucket.

    Variants of MLPerf's U-Net3D (Dice and cross-entropy, SGD):
      reference      MLPerf's reference: channels-first, fp16 autocast, eager
      channels-last  bf16, channels-last, eager
      compile        bf16, channels-last, torch.compile
      ours           fused kernels, bf16, channels-last, CUDA graphs

    Variants of nnU-Net's topology (deep supervision, its loss, SGD with Nesterov momentum, gradients clipped):
      nnunet         nnU-Net as it ships: channels-first, fp16, compiled
      nnunet-ours    the same network with our kernels and CUDA graphs

    A round gives every variant --steps steps, in another order each time. Warm-up, compilation and capture come first
    and are reported as start-up. Variants of a kind start from the same weights and see the same patches.

    Examples:
      voxlane bench step                                          all that this machine supports
      voxlane bench step --variant reference --variant ours --rounds 10
      voxlane bench step --variant ours --patch 96,160,160 --batch 4 --channels 4
      voxlane bench step --device cpu --patch 64,32,32 --steps 1  to see that it runs
      voxlane bench step --plot-from step-bench.json              the plot of a result from a machine without matplotlib
      python -m voxlane.bench.step                                the same with no package but torch (and Triton)
    """

    def _run(self) -> int:
        from voxlane.bench.step.__main__ import run

        return run(self)
