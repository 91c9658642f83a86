"""Test `voxlane bench step`: runs with tiny networks on the CPU, the groups of kernels, and requirements."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from voxlane.bench.step import measure as step
from voxlane.bench.step import profile as step_profile
from voxlane.bench.step import report as step_report
from voxlane.bench.step import variants as step_variants
from voxlane.bench.step.__main__ import main as step_main
from voxlane.bench.step.profile import GROUPS, Kernel, count_work, find_own_groups, group_kernels, group_of
from voxlane.bench.step.settings import VARIANTS, StepSettings
from voxlane.bench.step.variants import NnunetLoss, mlperf_loss
from voxlane.cli.main import main
from voxlane.model import kernels, networks
from voxlane.model.loss import DiceCE, head_weights

FEW = (2, 2, 2, 2, 2, 2)
QUICK = ("--device", "cpu", "--patch", "64,32,32", "--batch", "1", "--rounds", "2", "--steps", "1", "--warmup", "2")
CPU = torch.device("cpu")


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use networks of the same depth with few channels, and our modules for nnU-Net's network."""
    monkeypatch.setattr(networks, "MLPERF_FEATURES", FEW)
    shape = step_variants.NetworkShape(features=FEW)
    monkeypatch.setattr(step_variants, "NetworkShape", lambda: shape)
    monkeypatch.setattr(step_variants, "nnunet_network", lambda *_: None)


def bench(folder: Path, *words: str, status: int = 0) -> dict[str, Any]:
    """Run the benchmark in this process and return its result file."""
    out = folder / "out.json"
    assert main(["bench", "step", *QUICK, *words, "--out", str(out)]) == status
    result: dict[str, Any] = json.loads(out.read_text())
    return result


# -- whole runs --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("narrow")
def test_run_prints_tables_and_writes_result_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(tmp_path, "--commit", "abc")
    names = [name for name in VARIANTS if name != "compile"]
    assert [row["variant"] for row in result["summary"]] == names
    assert result["left_out"].keys() == {"compile"}
    assert result["commit"] == "abc"
    assert result["setting"]["patch"] == [64, 32, 32]
    assert {"torch", "voxlane"} <= result["versions"].keys()
    assert result["hardware"]["cores"]
    for row, samples in zip(result["summary"], result["samples"], strict=True):
        assert row["step_ms"]["min"] <= row["step_ms"]["median"] <= row["step_ms"]["max"]
        assert row["patches_per_s"]["median"] == pytest.approx(1000 / row["step_ms"]["median"])
        assert [len(times) for times in samples["rounds_ms"]] == [1, 1]
        assert len(samples["first_losses"]) == 2
        assert row["finite"]
        assert row["profile"]["groups_ms"].keys() == {*GROUPS, "between kernels"}
        assert row["profile"]["groups_ms"]["convolution"] > 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert all(any(line.startswith(f"{name} ") for line in lines) for name in names)
    assert any(line.startswith("layout copies") for line in lines)
    assert "ours: our kernels and CUDA graphs need a GPU: PyTorch's own operations instead" in lines
    assert "nnunet: our plain UNet, the same network: dynamic_network_architectures is not installed" in lines
    assert (tmp_path / "out.png").stat().st_size > 10_000


@pytest.mark.usefixtures("narrow")
def test_variants_take_turns_and_start_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    real = step.run_steps

    def block(variant: Any, *rest: Any) -> Any:
        taken.append(variant.name)
        return real(variant, *rest)

    monkeypatch.setattr(step, "run_steps", block)
    names = ["reference", "channels-last", "ours"]
    words = [word for name in names for word in ("--variant", name)]
    result = bench(tmp_path, *words, "--no-profile", "--no-plot", "--rounds", "3")
    assert result["orders"] == [names, [*names[1:], names[0]], [names[2], *names[:2]]]
    assert taken == [name for order in result["orders"] for name in order]
    assert not (tmp_path / "out.png").exists()
    assert all(row["profile"] is None for row in result["summary"])
    reference, *others = (samples["first_losses"] for samples in result["samples"])
    assert all(losses == pytest.approx(reference, rel=1e-4) for losses in others)
    assert len(set(reference)) == 2


@pytest.mark.usefixtures("narrow")
def test_nnunets_loss_and_settings_train_as_ours(tmp_path: Path) -> None:
    words = ("--variant", "nnunet", "--variant", "nnunet-ours", "--no-profile", "--no-plot", "--channels", "2")
    nnunet_losses, our_losses = (samples["first_losses"] for samples in bench(tmp_path, *words)["samples"])
    assert our_losses == pytest.approx(nnunet_losses, rel=1e-4)


@pytest.mark.usefixtures("narrow")
def test_failed_variant_is_reported_and_the_others_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = step.build

    def build(name: str, *rest: Any) -> Any:
        if name == "ours":
            raise torch.OutOfMemoryError("no room\nfor it")
        return real(name, *rest)

    monkeypatch.setattr(step, "build", build)
    result = bench(tmp_path, "--variant", "ours", "--variant", "reference", "--no-profile", status=1)
    failed, good = result["summary"]
    assert failed["error"] == "OutOfMemoryError: no room"
    assert good["step_ms"]["median"] > 0
    assert "ours: failed, OutOfMemoryError: no room" in capsys.readouterr().out.splitlines()


@pytest.mark.usefixtures("narrow")
def test_plot_can_be_drawn_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench(tmp_path, "--variant", "reference", "--no-plot", "--no-profile", "--rounds", "1")
    assert main(["bench", "step", "--plot-from", str(tmp_path / "out.json")]) == 0
    assert (tmp_path / "out.png").exists()
    (tmp_path / "other.json").write_text("{}")
    for name, message in (
        ("other.json", "not a result of voxlane bench step"),
        ("none.json", "cannot read the result file"),
    ):
        capsys.readouterr()
        assert main(["bench", "step", "--plot-from", str(tmp_path / name)]) == 1
        assert message in capsys.readouterr().err


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--patch", "100"), "--patch 100,100,100: 100 is not a multiple of 32"),
        (("--patch", "16,64,64"), "Give 32"),
        (("--patch", "32"), "leaves one voxel at the coarsest resolution"),
        (("--patch", "a"), "--patch a"),
        (("--variant", "theirs"), "Choose one of reference, channels-last, compile, ours, nnunet, nnunet-ours"),
        (("--outputs", "1"), "--outputs 1"),
        (("--outputs", "300"), "256 or fewer"),
        (("--batch", "0"), "--batch 0"),
        (("--rounds", "0"), "--rounds 0"),
        (("--device", "tpu"), "--device tpu"),
        (("--device", "cpu:7"), "Give cpu, cuda or cuda:N"),
        (("--device", "cuda:x"), "Give cpu, cuda or cuda:N"),
        (("--device", "cuda"), "--device cuda: torch finds no GPU"),
        (("--out", "/nowhere/x.json"), "cannot write the result file"),
    ],
)
def test_mistakes_give_one_line(
    words: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for start in (lambda: main(["bench", "step", *words]), lambda: step_main(words)):
        assert start() == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("voxlane: ")
        assert printed.err.count("\n") == 1
        assert message in printed.err


# -- losses ------------------------------------------------------------------------------------------------------------


def test_losses_of_peers_match_ours_in_value_and_gradient() -> None:
    torch.manual_seed(0)
    heads = [torch.randn(2, 3, side, side, side, dtype=torch.float64) for side in (8, 4)]
    label = torch.randint(0, 3, (2, 8, 8, 8), dtype=torch.uint8)
    pyramid = [label[:, None].short(), label[:, None, 1::2, 1::2, 1::2].short()]
    targets = [[1], [2]]

    def both(our_loss: Any, peer_loss: Any, logits: list[torch.Tensor]) -> None:
        values = []
        for loss in (our_loss, peer_loss):
            inputs = [each.clone().requires_grad_() for each in logits]
            value = loss(inputs)
            values.append((value, *torch.autograd.grad(value, inputs)))
        for our_value, peer_value in zip(*values, strict=True):
            torch.testing.assert_close(our_value, peer_value, check_dtype=False, rtol=1e-5, atol=1e-7)

    mine = DiceCE(False, target_values=targets, recipe="mlperf")
    both(lambda x: mine(x[0], label), lambda x: mlperf_loss(x[0], label[:, None]), heads[:1])
    deep, nnunet_loss = DiceCE(False, target_values=targets), NnunetLoss(compiled=False)
    # nnU-Net's network has one more head, which is not weighed.
    both(lambda x: deep(x, label), lambda x: nnunet_loss([*x, x[-1]], pyramid, head_weights(2)), heads)


def test_nnunets_own_network_is_ours_and_a_head_more() -> None:
    pytest.importorskip("dynamic_network_architectures")
    nnunet = step_variants.nnunet_network(1, 3)
    assert nnunet is not None
    plain = step_variants.plain_or_fused("nnunet", 1, 3, fused=False)
    head = step_variants.NetworkShape().features[4] * 3 + 3
    counts = [sum(p.numel() for p in network.parameters()) for network in (nnunet, plain)]
    assert counts[0] == counts[1] + head


# -- the profile and the floor -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_cudnn", "convolution"),
        ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_f16_s16816dgrad3d_optimized_f16_256x128>", "convolution"),
        ("cudnn_generated_fort_native_sm80_wgrad", "convolution"),
        ("void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true>", "layout copies"),
        ("void cudnn::engines_precompiled::nhwcToNchwKernel<__half, __half, float, true, false>", "layout copies"),
        ("void cudnn::ops::convertTensor_kernel<float, __half, float, (cudnnKernelDataType_t)0>", "layout copies"),
        (
            "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
            "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>>",
            "layout copies",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda("
            "at::TensorIteratorBase&)::{lambda(float)#1}, std::array<char*, 2ul>>",
            "other",
        ),
        (
            "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)"
            "::{lambda()#3}, std::array<char*, 2ul>, 4, at::native::memory::LoadWithCast<1>>",
            "other",
        ),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<OpaqueType<2u>>", "concatenation"),
        ("void at::native::batch_norm_collect_statistics_kernel<at::native::InvStd, c10::BFloat16>", "norm+activation"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<__half2, float, 512, true, 1>", "norm+activation"),
        ("void at::native::vectorized_elementwise_kernel<4, leaky_relu_kernel(TensorIterator)>", "norm+activation"),
        ("void at::native::vectorized_elementwise_kernel<4, launch_clamp_scalar(TensorIterator)>", "norm+activation"),
        ("void (anonymous namespace)::cunn_SpatialSoftMaxForward<float, float, float, int>", "loss"),
        ("void at::native::nll_loss2d_forward_kernel<float, float, long>", "loss"),
        ("void at::native::multi_tensor_apply_kernel<TensorListMetadata<3>, FusedSgdMathFunctor<float>>", "optimizer"),
        ("triton_poi_fused__to_copy_convolution_3", "other"),
        ("triton_red_fused__native_batch_norm_legit_convolution_2", "norm+activation"),
        ("Memcpy DtoD (Device -> Device)", "other"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, sum_functor<float>>>", "other"),
    ],
)  # fmt: skip
def test_purpose_of_a_kernel(name: str, group: str) -> None:
    assert group_of(name, {}) == group


def test_our_kernels_are_recognised_by_their_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrapped(name: str) -> Any:
        function = types.SimpleNamespace(__name__=name)
        return types.SimpleNamespace(fn=types.SimpleNamespace(fn=function))

    norm = types.SimpleNamespace(one=wrapped("_apply"), two=wrapped("_both"), plain=len)
    head = types.SimpleNamespace(one=wrapped("_taps"), two=wrapped("_both"))
    for name in ("norm", "loss", "final_conv", "upconv"):
        monkeypatch.delitem(sys.modules, f"voxlane.model.kernels.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "voxlane.model.kernels.norm", norm)
    monkeypatch.setitem(sys.modules, "voxlane.model.kernels.final_conv", head)
    profile = find_own_groups()
    assert {name: profile[name] for name in ("_apply", "_taps", "_both", "_join_kernel")} == {
        "_apply": "norm+activation",
        "_taps": "convolution",
        "_both": "other",
        "_join_kernel": "concatenation",
    }
    assert group_of("_apply", find_own_groups()) == "norm+activation"


def test_our_kernels_have_names_of_their_own() -> None:
    """A profile knows no more of them."""
    folder = Path(kernels.__file__).parent
    modules = {name: folder / f"{name}.py" for name in step_profile._OWN}
    texts = {name: path.read_text() for name, path in modules.items() if path.exists()}
    assert {"norm", "loss", "final_conv", "upconv"} <= texts.keys()
    jitted = re.compile(r"@triton\.jit.*\n(?:@.*\n)*def (\w+)")
    names = [name for text in texts.values() for name in jitted.findall(text)]
    assert len(names) > 10
    assert not [name for name in set(names) if names.count(name) > 1], "the same name in two modules of kernels"
    assert "_join_kernel" in names, "the profile puts it into a group of its own"
    for text in (path.read_text() for path in folder.glob("*.cu") if path.stem != "common"):
        native = re.findall(r"__global__ void [^;{]*?(\w+)\(const", text)
        assert set(native) <= step_profile._OWN_NAMES.keys()
        assert native


def test_marks_tell_loss_and_optimizer_from_the_rest() -> None:
    names = ["xmma_fprop", "MARK", "reduce_kernel", "MARK", "xmma_wgrad", "MARK", "reduce_kernel", "MARK"] * 2
    ran = [
        Kernel("spin_kernel(long)" if name == "MARK" else name, 10.0 * at, 7.0 if name == "MARK" else 1000.0)
        for at, name in enumerate(names)
    ]
    profile = group_kernels(reversed(ran), ("forward", "loss", "backward", "optimizer"), 2)
    message = {group: ms for group, ms in profile.groups_ms.items() if ms}
    assert message == {"convolution": 2.0, "loss": 1.0, "optimizer": 1.0}
    assert sum(profile.groups_ms.values()) == 4.0
    assert profile.launches == 4
    assert {(row["name"], row["group"], row["runs"]) for row in profile.kernels} == {
        ("xmma_fprop", "convolution", 1.0),
        ("xmma_wgrad", "convolution", 1.0),
        ("reduce_kernel", "loss", 1.0),
        ("reduce_kernel", "optimizer", 1.0),
    }


@pytest.mark.parametrize("kind", ["mlperf", "nnunet"])
def test_lower_bound_counts_the_convolutions(kind: Any) -> None:
    setting = StepSettings(device="cpu")
    with torch.device("meta"):
        network = step_variants.plain_or_fused(kind, 1, 3, fused=False)
        image = torch.empty(2, 1, 64, 64, 64)
    with FlopCounterMode(display=False) as counter:
        network(image)
    assert count_work(kind, setting, (64, 64, 64)).flops == 3 * counter.get_total_flops()
    whole = count_work(kind, setting, (128, 128, 128)).flops
    assert whole == pytest.approx(5.7e12, rel=0.02)


def test_rate_comes_from_the_best_attempt() -> None:
    assert step_profile.measure_matrix_flops_per_s(CPU) > 1e8
    assert step_profile.measure_copy_bytes_per_s(CPU) > 1e7


@pytest.mark.parametrize(
    ("started", "message"),
    [
        (("voxlane", "bench", "step", "--out", "/a/b.json", "--steps", "3"), ["--steps", "3"]),
        (("/x/step/__main__.py", "--variant", "ours", "--out=/a/b.json", "--commit", "abc"), ["--variant", "ours"]),
        (("pytest", "tests"), []),
    ],
)
def test_command_is_printed_without_paths(started: tuple[str, ...], message: list[str]) -> None:
    assert step_report._find_flags(list(started)) == message


def test_non_finite_loss_is_reported() -> None:
    setting = StepSettings(variant=("ours",), device="cpu", patch="64,32,32")
    profile = step.VariantTimes(
        "ours", first_losses=[1.0, float("inf")], last_loss=float("nan"), rounds_ms=[[1.0]], first_s=1.0
    )
    outcome = step.StepResult(
        "cpu", (64, 32, 32), [profile], {}, [["ours"]], {"mlperf": step_profile.ConvolutionWork(1.0, 1.0)}, 1.0, 1.0
    )
    result = step_report.build_report(setting, outcome)
    json.dumps(result, allow_nan=False)
    assert "ours: the loss is not finite" in step_report.format_report(result).splitlines()


# -- what it needs -----------------------------------------------------------------------------------------------------

_ALONE = """
import importlib.machinery, runpy, sys

class TorchAlone(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        profile = super().find_spec(name, path, target)
        top = name.partition(".")[0]
        allowed = {"torch", "torchgen", "functorch", "triton", "voxlane", *sys.stdlib_module_names, *torch_needs}
        return profile if top in allowed or top.startswith("_") else None

torch_needs = {"typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock", "fsspec"}
sys.meta_path[:] = [TorchAlone if f is importlib.machinery.PathFinder else f for f in sys.meta_path]
from voxlane.model import networks
networks.MLPERF_FEATURES = (2,) * 6
sys.argv[0] = "voxlane"
module = sys.argv.pop(1)
runpy.run_module(module, run_name="__main__")
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", [("voxlane.bench.step",)])
def test_it_needs_torch_alone(start: tuple[str, ...], tmp_path: Path) -> None:
    words = ["--device", "cpu", "--patch", "64,32,32", "--batch", "1", "--rounds", "1", "--steps", "1", "--warmup", "1"]
    out = tmp_path / "out.json"
    command = [sys.executable, "-W", "ignore", "-c", _ALONE, *start, *words, "--variant", "ours", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["summary"][0]["variant"] == "ours"
    assert "no plot, because matplotlib is not installed" in done.stderr
    assert done.stdout.startswith("cpu: a step of 1 patches of 64x32x32")
