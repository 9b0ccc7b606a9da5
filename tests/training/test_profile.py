"""A profile says where the time went and changes nothing else, whatever happens to it or to the run."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

import headway
from headway.cli import run_command
from headway.console import Reporter
from headway.errors import Interrupted, Quit
from headway.training import parts
from headway.training.profile import Profile, covered, kernels_table, kind_of, table
from tests.training.test_resume import StopAt, final_weights, same

LONG = [
    "model.layers=1",
    "training.accumulate=1",
    "pretraining.training.steps=3",
    "training.steps=40",
    "training.checkpoint_every=15",
    "training.log_every=4",
]
SHORT = [*LONG, "training.steps=12"]  # a window of two steps
CPU = torch.device("cpu")


class Said(Reporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    @property
    def of_profile(self) -> list[str]:
        return [line for line in self.lines if line.startswith("profile: ")]


def shares(text: str) -> dict[str, float]:
    """The parts of the step in profile.txt, in percent."""
    block = text.split("part of the step")[1].split("\n\n", maxsplit=1)[0].split("\n")[1:]
    found = (re.fullmatch(r"(\S.*?) +[\d.]+ +([\d.]+)%", line) for line in block)
    return {match[1]: float(match[2]) for match in found if match}


def test_a_profile_changes_no_weight_and_tells_where_the_time_went(run_file: Path, tmp_path: Path) -> None:
    plain = headway.train(run_file, tmp_path / "plain", LONG)
    report = Said()
    run = headway.train(run_file, tmp_path / "run", LONG, report=report, profile=True)
    assert same(final_weights(run.path), final_weights(plain.path))
    assert not any(path.name.startswith("profile") for path in plain.path.iterdir())

    text = (run.path / "profile.txt").read_text()
    assert text.startswith("training, steps 11 to 30, on cpu")  # the first stage is too short
    found = shares(text)
    named = {"making batches", "forward", "backward", "clipping", "optimizer"}
    assert "not counted, between steps: checkpoints" in text and "checkpoints" not in found
    assert named < found.keys() and sum(found.values()) == pytest.approx(100, abs=1)
    assert found["backward"] > found["clipping"]
    assert re.search(r"^aten::addmm +[\d.]+ ", text, re.M)
    trace = json.loads(gzip.decompress((run.path / "profile.json.gz").read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"] if event.get("ph") == "X"]
    assert names.count("headway: clipping") == 20 and "aten::addmm" in names
    assert len(report.of_profile) == 1
    assert report.lines.index("writing the profile …") < report.lines.index(report.of_profile[0])
    said = report.of_profile[0]
    assert "backward" in said and all(str(run.path / name) in said for name in ("profile.txt", "profile.json.gz"))


def test_without_a_profile_a_part_costs_nothing() -> None:
    assert parts.during("forward") is parts.NOTHING
    with parts.watching():
        assert parts.during("forward") is not parts.NOTHING
    assert parts.during("forward") is parts.NOTHING


def test_an_interrupted_run_keeps_its_state_and_what_was_seen(run_file: Path, tmp_path: Path) -> None:
    expected = final_weights(headway.train(run_file, tmp_path / "whole", LONG).path)
    with pytest.raises(Interrupted):
        headway.train(run_file, tmp_path / "run", LONG, watch=StopAt(3 + 16), profile=True)
    assert (tmp_path / "run" / "profile.txt").read_text().startswith("training, steps 11 to 16,")
    report = Said()
    with pytest.raises(Interrupted):  # before the window of the next attempt
        headway.train(run_file, tmp_path / "run", LONG, True, report, StopAt(3 + 20), profile=True)
    assert report.of_profile == ["profile: stopped after 4 of 10 steps of warming up; nothing was written"]
    assert same(final_weights(headway.train(run_file, tmp_path / "run", LONG, resume=True).path), expected)


def test_who_wants_to_leave_at_once_does_not_wait_for_a_table(tmp_path: Path) -> None:
    report = Said()
    profile = Profile(tmp_path, report, [12])
    profile.begin("training", 12, CPU)
    with pytest.raises(Quit), profile:
        for step in range(11):
            profile.after(step)
        assert parts.watched
        raise Quit("now")
    assert not parts.watched and not report.lines and not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["start", "export_chrome_trace", "events"])
def test_a_profile_that_fails_does_not_end_the_run(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fail(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("no such counter")

    monkeypatch.setattr(torch.profiler.profile, what, fail)
    report = Said()
    run = headway.train(run_file, tmp_path / "run", SHORT, report=report, profile=True)
    assert run.state.done and not parts.watched
    assert report.of_profile == ["profile: failed (RuntimeError: no such counter); training goes on without it"]


def test_a_run_with_nothing_left_says_so(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run_file.parent / "run"
    sets = [word for each in SHORT for word in ("--set", each)]
    assert run_command(["train", str(run_file), "--out", str(out), *sets]) == 0
    capsys.readouterr()
    assert run_command(["train", str(out), "--resume", "--profile"]) == 0
    shown = capsys.readouterr().err
    assert "profile: no step is left to look at" in shown and not (out / "profile.txt").exists()


@pytest.mark.parametrize(
    ("stages", "seen"),
    [
        ([40], "training 0, steps 11 to 30,"),
        ([15], "training 0, steps 11 to 15,"),
        ([6, 11], "training 1, steps 11 to 11,"),
        ([6, 5], "training 0, steps 4 to 6,"),
        ([1], "training 0, steps 1 to 1,"),
        ([40, 40], "training 0, steps 11 to 30,"),
    ],
)
def test_the_window_lies_behind_the_first_steps_where_it_can(tmp_path: Path, stages: list[int], seen: str) -> None:
    report = Said()
    profile = Profile(tmp_path, report, stages)
    for number, left in enumerate(stages):
        profile.begin(f"training {number}", left, CPU)
        with profile:
            for step in range(left):
                profile.after(step)
    assert (tmp_path / "profile.txt").read_text().startswith(seen)
    few = any("warming up" in line for line in report.of_profile)
    assert few == (max(stages) <= 10) and len(report.of_profile) == 1 + few


# ---- the table


def event(name: str, begin: float, end: float) -> SimpleNamespace:
    span = SimpleNamespace(start=1e6 * begin, end=1e6 * end)
    return SimpleNamespace(
        name=name, time_range=span, device_type=DeviceType.CPU, self_cpu_time_total=1e6 * (end - begin)
    )


def test_what_comes_between_steps_changes_no_figure_of_the_steps() -> None:
    steps = [event(f"{parts.PREFIX}forward", 0, 2), event("aten::mm", 0, 1)]
    later = [event(f"{parts.PREFIX}evaluation", 3, 8), event("aten::mm", 4, 7), event("aten::sort", 7, 8)]
    alone = table(SimpleNamespace(events=lambda: steps), steps=2, seconds=4.0)
    scored = table(SimpleNamespace(events=lambda: [*steps, *later]), steps=2, seconds=9.0)
    assert scored.pop(1) == "not counted, between steps: evaluation 5.00 s"
    assert scored == alone and alone[0].startswith("2000.00 ms a step, 2 steps, 4.00 s")


# ---- kernels


def kernel(name: str, begin: float, end: float) -> SimpleNamespace:
    span = SimpleNamespace(start=begin, end=end, elapsed_us=lambda: end - begin)
    return SimpleNamespace(name=name, time_range=span, device_type=DeviceType.CUDA)


def test_a_device_is_busy_while_one_kernel_runs_or_several() -> None:
    assert covered([(5, 7), (0, 3), (1, 2), (2, 4)]) == 6
    spans = [kernel("gemm", 0, 3e5), kernel("gemm", 2e5, 4e5), kernel("Memcpy HtoD", 9e5, 10e5)]
    lines = kernels_table(spans, steps=2, seconds=1.0)
    assert lines[0] == "the device was busy for 250.00 of 500.00 ms a step (50.0%)"
    kinds = lines[lines.index("kernels by kind:") + 2 :]
    assert kinds[0].split() == ["matrix", "products", "1.0", "250.000", "50.0%"]
    assert kinds[1].split() == ["copies", "0.5", "50.000", "10.0%"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "matrix products"),
        ("fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention)", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("triton_per_fused_native_layer_norm_3", "norms and pointwise"),
        ("short_attention_backward", "attention"),
        ("norm_gradients", "norms and pointwise"),
        ("gelu_gradients", "norms and pointwise"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<float, BFloat16>>", "copies"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda(TensorIteratorBase&)>", "copies"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("Memset (Device)", "copies"),
        ("triton_poi_fused__to_copy_7", "copies"),
        ("triton_poi_fused__to_copy_add_7", "norms and pointwise"),
        ("triton_poi_fused__to_copy_slice_view_19", "copies"),
        ("triton_per_fused__to_copy_add_mul_native_layer_norm_native_layer_norm_backward_13", "norms and pointwise"),
        ("something_new", "other"),
    ],
)
def test_kernels_are_told_apart_by_their_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind
