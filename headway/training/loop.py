"""The training loop.

A run has one or two stages (pretraining, training), each a task with its own schedule and optimizer. Steps are counted
over both. Which rows a step sees, how they are corrupted and what dropout drops are functions of (seed, stage, step): a
run that is stopped anywhere and resumed ends with the same weights, bit for bit on a CPU.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from headway.console import Progress, Reporter, between_steps, scores
from headway.errors import Interrupted, UserError
from headway.memory import is_out_of_memory
from headway.models import Model
from headway.training import device as devices
from headway.training import distributed
from headway.training import optimizer as optimizers
from headway.training.accounting import Costs, Meter, peak_flops
from headway.training.checkpoint import Checkpoints, State, all_finite
from headway.training.engine import Engine, Outcome, pieces_of
from headway.training.guard import (
    IN_A_ROW,
    OnTheWay,
    Spikes,
    Stopped,
    Stops,
    Unseen,
    describe_rows,
    interruptible,
)
from headway.training.order import mix
from headway.training.parts import during
from headway.training.profile import Profile, Unprofiled
from headway.training.record import Record
from headway.training.stage import Stage, TrainingSettings, rate_of, streams_of
from headway.training.streams import Stream


@dataclass
class Plan:
    """What a stage needs at every step: what carries it out, how fast to learn, what to save with the weights."""

    stage: Stage
    engine: Engine
    rate: Callable[[int], float]  # of a step, as a share of the peak
    optimizer: optimizers.Optimizer
    streams: Sequence[Stream]
    spikes: Spikes
    at_hand: bool  # loss and gradient can be looked at without waiting for a device
    unseen: Unseen  # what happened in steps that were not looked at
    meter: Meter
    threads: int  # of a CPU
    progress: Progress = field(default_factory=Progress)
    lines: deque[Line] = field(default_factory=deque)  # that are still to be written
    bad: list[int] = field(default_factory=list)  # steps without numbers of which nobody has been told
    longest: int = 0  # row of such steps


@dataclass
class Line:
    """A step that is to be logged, once its numbers are there."""

    step: int  # of the stage, from 1 on
    rate: float
    tokens: int  # of the run so far
    streams: Sequence[str]
    unseen: Unseen  # steps that were not looked at, this one among them
    numbers: OnTheWay  # loss, norm of the gradient, each stream's loss; losses and norms of the unseen


@dataclass
class Trainer:
    """Trains `model` through `stages` and keeps the record in `directory`."""

    model: Model
    stages: list[Stage]
    directory: Path
    fingerprint: str
    report: Reporter
    watch: Callable[[dict[str, Any]], None] = lambda record: None  # sees every record of metrics.jsonl
    state: State = field(default_factory=State)
    profile: bool = False  # look at a window of steps
    layout: distributed.Layout = None  # type: ignore[assignment]  # one process has it all

    def __post_init__(self) -> None:
        self.layout = self.layout or distributed.Layout(self.model)
        self.ranks = self.layout.ranks
        self.checkpoints = Checkpoints(self.directory)
        self.writer = self.layout.writer(self.checkpoints)
        self.record = Record(self.directory / "metrics.jsonl", self.report.say)
        self.stops = Stops()
        self.resumed_at: int | None = None
        self.saved: int | None = None  # the step that this process saved last, or began at
        self.state.tokenizer = self.fingerprint

    def resume(self, back_to: int | None = None) -> None:
        """Go back to the newest whole checkpoint, or to the one that is named: then those after it are let go.

        A finished run that was given more steps or patience goes on.
        """
        newest, step, best_is_there = self.ranks.led(lambda: self.recover(back_to))
        if step is None:
            self.report.say("no checkpoint yet: beginning at step 0")
            return
        self.state = self.checkpoints.state(step)
        self.checkpoints.load_model(step, self.model)
        self.resumed_at = self.saved = step
        last = self.stages[-1]
        self.state.done = self.state.done and (step >= last.end or self.is_enough(last))
        if not best_is_there:
            self.state.best_step, self.state.best_value, self.state.since_best = None, None, 0
        self.ranks.led(lambda: self.tidy(step, newest, back_to is not None))
        again = f"; to be trained again: {steps_after(step, newest)}" if newest > step else ""
        self.report.say(
            f"finished at step {step:,} already" if self.state.done else f"resuming after step {step:,}{again}"
        )

    def recover(self, back_to: int | None) -> tuple[int, int | None, bool]:
        """(the newest checkpoint, the one to go on from, whether the best one that it knows is whole). What a killed
        process left is cleared away."""
        checkpoints = self.checkpoints
        checkpoints.finish()
        newest = max(checkpoints.steps(), default=0)
        step = checkpoints.require_whole(self.report.say) if back_to is None else checkpoints.require(back_to)
        state = checkpoints.state(step) if step is not None else self.state
        checkpoints.require_tokenizer(state.tokenizer, self.fingerprint)
        checkpoints.clear_remains()
        if step is None:
            if checkpoints.mark.exists():  # it has had some
                self.record.set_aside(f"{checkpoints.directory}: nothing is in it any more")
                checkpoints.mark.unlink()
            self.record.begin()
        return newest, step, self.is_best_there(state)

    def is_best_there(self, state: State) -> bool:
        """Whether the weights of the best score are still to be had; where they are not, that is said."""
        if state.best_step in (None, state.step) or self.checkpoints.latest(
            self.report.say, {state.best_step}, owned=True
        ):
            return True
        self.report.say(f"the best score so far, at step {state.best_step:,}, has no weights any more: it is forgotten")
        return False

    def tidy(self, step: int, newest: int, for_good: bool) -> None:
        """Nothing in the directory is of later steps than `step`, where the run goes on; `for_good` removes the
        checkpoints after it, which else are damaged and set aside."""
        for later in (each for each in self.checkpoints.steps() if each > step):
            if for_good:
                self.checkpoints.remove(self.checkpoints.path(later))
            else:
                self.checkpoints.set_aside(later)
        if not for_good and newest == step and not self.state.given_up:
            # it may have been killed before older ones were let go
            stage = next((stage for stage in self.stages if step <= stage.end), self.stages[-1])
            self.checkpoints.prune(step, stage.settings.keep)
        self.record.go_back(step, [stage.name for stage in self.stages if self.is_owed(stage)])

    def run(self) -> State:
        """Train what is left of the stages."""
        left = [stage for stage in self.stages if self.is_left(stage)]
        numbers = 3 if {stage.settings.optimizer for stage in left} == {"adamw"} else 2  # kept of each weight
        if left:
            self.ranks.led(lambda: self.checkpoints.require_room(self.model, numbers))
        steps = [stage.end - max(stage.begin, self.state.step) for stage in left]
        profile = Profile(self.directory, self.report, steps) if self.profile else Unprofiled()
        with interruptible() as self.stops, self.writer:
            for stage in left:
                self.fit(stage, profile)
            if self.ranks.led(lambda: self.state.step not in self.checkpoints.steps()):  # a run of no steps
                self.state.done = True
                self.writer.save(self.model, None, self.state, self.stages[-1].settings.keep)
        return self.state

    def is_left(self, stage: Stage) -> bool:
        """Whether there is something to do in a stage."""
        return self.is_owed(stage) or (not self.state.done and self.state.step < stage.end)

    def is_owed(self, stage: Stage) -> bool:
        """Whether the model is to be scored before its next step: that was broken off, or the run was given up at the
        last step of all, or the last stage has no steps."""
        step = self.state.step
        if self.state.unscored and stage.begin < step <= stage.end:
            return True
        return stage.final and step >= stage.end and step > 0 and not self.state.done

    def fit(self, stage: Stage, profile: Unprofiled) -> None:
        """Train one stage to its end."""
        settings, state = stage.settings, self.state
        plan = self.plan(stage)
        meter = plan.meter
        self.model.train()
        profile.begin(stage.name, stage.end - state.step, meter.device)
        meter.skip()
        with (
            devices.threads_at_most(plan.threads),
            profile,
            self.report.progress(stage.name, settings.steps, state.step - stage.begin) as plan.progress,
            self.rescued(plan),
        ):
            owed = state.unscored = self.is_owed(stage)
            while owed or state.step < stage.end:
                if not owed:
                    self.advance(plan)
                step, last = state.step - stage.begin, state.step >= stage.end
                scored = state.unscored
                regular = due(settings.checkpoint_every, step) or last
                if scored or regular:
                    self.catch_up(plan)
                meter.lap()
                if not owed:
                    profile.after(step - 1)
                better, enough = self.evaluate(stage, regular) if scored else (False, False)
                if (regular or better or enough or owed) and not (owed and state.unscored):
                    self.catch_up(plan)
                    self.save(plan)
                self.writer.check()
                if enough:
                    break
                if not state.done and self.ranks.highest(self.stops.number):
                    self.leave(plan)
                owed = False
                meter.skip()
            if stage.final:
                self.writer.wait()  # here, where what was refused is tried once more
        self.report.say(f"{stage.name}: {meter.summary()}")

    def leave(self, plan: Plan) -> NoReturn:
        """End the run, as a signal asked for: what is not saved yet is saved."""
        step = self.state.step
        self.catch_up(plan)
        if step > plan.stage.begin and self.saved != step:
            self.save(plan, regular=False)
        self.writer.wait()
        where = f"after step {step:,}, state saved" if step else "before the first step"
        owed = ", its evaluation is still to be made" if self.state.unscored else ""
        raise Interrupted(f"stopped {where}{owed}", self.ranks.highest(self.stops.number))

    def advance(self, plan: Plan) -> None:
        """Take the next step, and write the lines of earlier ones whose numbers are there by now."""
        stage, state = plan.stage, self.state
        settings, step = stage.settings, state.step - stage.begin
        share = plan.rate(step)
        try:
            done = self.step(plan, step, share)
        except Stopped:  # before it began
            self.leave(plan)
        logged = due(settings.log_every, step + 1) or state.step + 1 == stage.end
        if plan.at_hand:
            logged = self.look(plan, step, float(done.loss), float(done.norm)) and logged
        else:
            plan.unseen.see(step, done)
        state.step += 1
        state.tokens += done.tokens
        state.unscored = due(settings.evaluate_every, step + 1) or (stage.final and state.step >= stage.end)
        plan.optimizer.uncounted = False
        earlier = len(plan.lines)
        if logged:
            unseen = plan.unseen.take()
            numbers = OnTheWay([done.loss, done.norm, *done.losses.values(), *unseen.losses, *unseen.norms])
            line = Line(step + 1, share * settings.learning_rate, state.tokens, [*done.losses], unseen, numbers)
            plan.lines.append(line)  # first of all: whatever fails from here on, it is written
        if earlier and (logged or self.ranks.size > 1 or plan.lines[0].numbers.arrived()):
            self.settle(plan, earlier)  # all processes at the same step
        plan.meter.add(done)
        if logged and plan.at_hand:
            self.settle(plan, 1)
        elif len(plan.unseen.losses) == Unseen.MOST:
            self.catch_up(plan)

    def settle(self, plan: Plan, lines: int) -> None:
        """Write so many of the lines that are still to be written."""
        for _ in range(lines):
            self.write_line(plan, plan.lines.popleft())
        self.judge(plan)

    def catch_up(self, plan: Plan) -> None:
        """Wait for the last step: nothing of the steps so far is left to be written or looked at."""
        self.look_back(plan)
        self.judge(plan)

    def look_back(self, plan: Plan) -> None:
        """Write all lines, and count the steps without numbers behind them."""
        while plan.lines:
            self.write_line(plan, plan.lines.popleft())
        unseen = plan.unseen.take()
        self.count_bad(plan, unseen.first, OnTheWay([*unseen.losses, *unseen.norms]).read())

    def step(self, plan: Plan, step: int, share: float) -> Outcome:
        """One step of the stage; where there is no memory for it, the settings to change are named."""
        stage = plan.stage
        try:
            with (
                devices.repeatable(plan.meter.device, stage.settings.deterministic),
                devices.tf32_products(plan.meter.device, stage.settings.precision == "tf32"),
            ):
                with self.stops.at_once(self.ranks.size == 1):  # of several, all stop after the same step
                    plan.engine.prepare(step, self.stops.undisturbed)
                return plan.engine.step(step, share)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        self.rescue(plan)  # out here, where nothing of the failed step is held any more
        settings, pieces = stage.settings, stage.settings.accumulate or "chosen by the device"
        rows = "".join(f" or streams.{side.name}.rows ({side.settings.rows})" for side in stage.sides)
        saved = ""
        if self.ranks.size == 1:  # of several, another one writes, and does not wait for this one
            last = self.last_checkpoint()
            saved = f"; the last checkpoint is of step {last:,}" if last is not None else "; there is no checkpoint yet"
        raise UserError(
            f"out of memory at step {self.state.step + 1:,}; take it in more pieces with {stage.place}.accumulate (now "
            f"{pieces}), or lower {stage.place}.batch_size ({settings.batch_size}){rows}{saved}"
        )

    def write_line(self, plan: Plan, line: Line) -> None:
        """Write the line of a step, unless its loss or gradient is no number."""
        stage = plan.stage
        loss, norm, *others = line.numbers.read()
        losses, others = others[: len(line.streams)], others[len(line.streams) :]
        self.count_bad(plan, line.unseen.first, others)
        if plan.optimizer.is_fine(loss, norm):
            record = {
                "stage": stage.name,
                "step": stage.begin + line.step,
                "loss": loss,
                **({"losses": dict(zip(line.streams, losses, strict=True))} if stage.sides else {}),
                "learning_rate": line.rate,
                "gradient_norm": norm if math.isfinite(norm) else None,  # float16 overflowed
                "tokens": line.tokens,
                **plan.meter.read(),
                **({"skipped": self.state.skipped} if self.state.skipped else {}),
            }
            self.write(record)
            self.show(record)
            plan.progress.update(line.step, record)
            self.warn_of_spike(plan, record)

    def look(self, plan: Plan, step: int, loss: float, norm: float) -> bool:
        """Whether the step's loss and gradient are numbers. A step without them changed no weight: it ends the run, or
        is counted and passed over."""
        stage, state = plan.stage, self.state
        if plan.optimizer.is_fine(loss, norm):
            state.skipped_in_a_row = 0
            return True
        what = f"the loss is {loss} and the gradient's norm {norm} at step {state.step + 1:,}"
        if stage.settings.bad_steps == "stop" or state.skipped_in_a_row + 1 == IN_A_ROW:
            self.give_up(plan, step, what)
        state.skipped += 1
        state.skipped_in_a_row += 1
        if state.skipped <= IN_A_ROW or state.skipped % 100 == 0:
            rows = describe_rows(plan.streams, step)
            self.report.say(f"{stage.name}: {what}; passed over, {state.skipped} so far; its rows are {rows}")
        return False

    def count_bad(self, plan: Plan, first: int, numbers: Sequence[float]) -> None:
        """Of the steps from `first` on that nobody waited for, by their losses and norms, count those that were no
        numbers as passed over."""
        state = self.state
        half = len(numbers) // 2
        for step, (loss, norm) in enumerate(zip(numbers[:half], numbers[half:], strict=True), first):
            if plan.optimizer.is_fine(loss, norm):
                state.skipped_in_a_row = 0
            else:
                plan.bad.append(step)
                state.skipped += 1
                state.skipped_in_a_row += 1
                plan.longest = max(plan.longest, state.skipped_in_a_row)

    def judge(self, plan: Plan) -> None:
        """Say what there is to say of steps without numbers that are over, or end the run."""
        stage, bad, longest = plan.stage, plan.bad, plan.longest
        plan.bad, plan.longest = [], 0
        if not bad:
            return
        first, last = (f"step {stage.begin + step + 1:,}" for step in (bad[0], bad[-1]))
        which = f"{len(bad)} steps since the last line, from {first} to {last}," if len(bad) > 1 else first
        what = f"{which} had a loss or gradient that is no number"
        if stage.settings.bad_steps == "stop" or longest >= IN_A_ROW:
            self.give_up(plan, bad[0], what)
        self.report.say(f"{stage.name}: {what}; passed over, {self.state.skipped} so far")

    def give_up(self, plan: Plan, step: int, what: str) -> NoReturn:
        """Save the weights as the last good step left them, and say what was wrong and which rows `step` saw."""
        stage, state = plan.stage, self.state
        settings = stage.settings
        self.look_back(plan)
        if state.step > stage.begin and self.saved != state.step:
            state.given_up = True
            self.save(plan, regular=False)
        steps = self.ranks.led(self.saved_steps)
        before = f"; the last checkpoint is of step {steps[-1]:,}" if steps else ""
        if steps[:-1]:
            before += f" (go back to an earlier one with --resume --back-to {self.ranks.led(self.steady)})"
        elif steps:
            before += ", and may be spoilt already: there is no earlier one, so begin anew if it fails again"
        rate = plan.rate(step) * settings.learning_rate
        many, way = "", f', or pass over such steps with {stage.place}.bad_steps = "skip"'
        if settings.bad_steps == "skip":
            many, way = f", {IN_A_ROW} such steps in a row", ""
        raise UserError(
            f"{what} (learning rate {rate:.2g}){many}; such a step changes no weight{before}. Lower "
            f"{stage.place}.learning_rate or lengthen {stage.place}.warmup (with --accept-changes, to go on){way}; "
            f"the rows of step {stage.begin + step + 1:,} are {describe_rows(plan.streams, step)}"
        )

    def warn_of_spike(self, plan: Plan, record: dict[str, Any]) -> None:
        stage = plan.stage
        usual = plan.spikes.see(record["loss"])
        if usual is not None:
            self.report.say(
                f"{stage.name}: {stage.at(record['step'])}: the loss is {record['loss']:.4f}, far above the last "
                f"{Spikes.WINDOW} logged (median {usual:.4f}); where it stays there, lower {stage.place}.learning_rate"
            )

    def save(self, plan: Plan, regular: bool = True) -> None:
        """Write a checkpoint, in the background; weights that are not numbers are never saved.

        Among steps without numbers, and after a run was given up for these, those before are not let go of, as one of
        them may be the better: not until a `regular` one behind a step that was fine.
        """
        stage = plan.stage
        if self.ranks.highest(not all_finite(self.model)):
            last = self.last_checkpoint()
            before = f"; the last checkpoint is from before (step {last:,})" if last is not None else ""
            raise UserError(
                f"the weights are not finite after step {self.state.step:,}{before}. "
                f"Lower {stage.place}.learning_rate or lengthen {stage.place}.warmup"
            )
        self.state.given_up = self.state.skipped_in_a_row > 0 or (self.state.given_up and not regular)
        keep = sys.maxsize if self.state.given_up else stage.settings.keep
        try:
            with during("checkpoints"):
                self.writer.save(self.model, plan.optimizer, self.state, keep)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"out of memory for the checkpoint of step {self.state.step:,}, which takes a copy of weights and "
                "optimizer on the host; end what else is running there, or lower model.layers or model.width"
            ) from None
        self.saved = self.state.step

    @contextmanager
    def rescued(self, plan: Plan) -> Iterator[None]:
        """Whatever fails within it, the steps before it are kept."""
        try:
            yield
        except Interrupted:
            raise
        except Exception:
            self.rescue(plan)
            raise

    def rescue(self, plan: Plan) -> None:
        """Keep the steps before something that failed, and is not their fault, as well as may be.

        Several processes would wait for one another: of these, the last checkpoint counts.
        """
        if self.ranks.size > 1:
            return
        try:
            self.writer.wait()
        except Exception as error:
            self.report.say(f"a checkpoint could not be written: {error}")
        why = ""
        try:
            self.writer.again()
            self.catch_up(plan)
            self.record.again()
            unsaved = self.state.step > plan.stage.begin and self.saved != self.state.step
            if unsaved and not plan.optimizer.uncounted:
                self.save(plan, regular=False)
                self.writer.wait()
        except Exception as error:
            why = f" ({error})"
        with suppress(Exception):
            newest = max(self.checkpoints.steps(), default=0)
            if newest < self.state.step:
                self.report.say(f"not saved{why}, to be trained again: {steps_after(newest, self.state.step)}")

    def saved_steps(self) -> list[int]:
        self.writer.wait()
        return self.checkpoints.steps()

    def steady(self) -> int:
        """Of at least two checkpoints, the newest but the last that was saved with nothing wrong; else that before."""
        *earlier, _ = self.saved_steps()
        fine = (step for step in reversed(earlier) if self.checkpoints.is_steady(step))
        return next(fine, earlier[-1])

    def last_checkpoint(self) -> int | None:
        return max(self.saved_steps(), default=None)

    def plan(self, stage: Stage) -> Plan:
        """Get a stage's data, optimizer and schedule ready, at the step where the run stands."""
        settings, task = stage.settings, stage.task
        device = next(self.model.parameters()).device
        precision, why = devices.choose_precision(device, settings.precision, self.model.settings.width)
        seed = mix(settings.seed, stage.name)
        streams = streams_of(stage, seed)
        optimizer = self.optimizer(stage, device, precision)
        engine, words = self.layout.engine(streams, optimizer, seed, precision, settings, self.report.say)
        words.append(optimizers.choose_fused(device, settings.fused)[1])
        asked = {settings.engine, settings.batches, settings.fused} - {"auto", "plain"}
        if device.type == "cpu" and optimizer.fused and not asked:
            words.clear()  # nothing was chosen
        costs = Costs(self.layout.at_hand(), streams)
        threads, own = self.threads(settings, costs, device), torch.get_num_threads()
        if threads < own:
            words.append(f"{threads} of {own} threads (its rows keep no more busy)")
        beside = "".join(f" and {side.settings.rows} of {side.name}" for side in stage.sides)
        rows = f"{stage.name}: {settings.steps:,} steps of {settings.batch_size} rows{beside}"
        self.report.say("; ".join([f"{rows}, {dtype(precision)} ({why})", *words]))
        spikes = Spikes(settings.spike_warning)
        for record in self.record.lines():  # of before it was resumed
            if record.get("stage") == stage.name and isinstance(record.get("loss"), float):
                spikes.see(record["loss"])
        rate = rate_of(settings, streams[0].order, task.block)
        peak = peak_flops(device, precision, settings.precision == "tf32" and devices.has_tf32(device))
        meter = Meter(self.state, costs, peak and peak * self.ranks.size, device)
        return Plan(stage, engine, rate, optimizer, streams, spikes, device.type == "cpu", Unseen(), meter, threads)

    def optimizer(self, stage: Stage, device: torch.device, precision: torch.dtype) -> optimizers.Optimizer:
        """A stage's optimizer as the run left it; that of the stage before, to be saved again, where a stage that is
        scored only has no steps."""
        step, settings = self.state.step, stage.settings
        if not settings.steps:
            settings = next((each.settings for each in reversed(self.stages) if each.begin < step), settings)
            precision, _ = devices.choose_precision(device, settings.precision, self.model.settings.width)
            self.ranks.led(self.saved_steps)
        optimizer = optimizers.build_optimizer(self.model, settings, precision)
        if step and (not stage.settings.steps or (self.resumed_at is not None and stage.begin < step)):
            self.checkpoints.load_optimizer(step, optimizer)
        return optimizer

    def threads(self, settings: TrainingSettings, costs: Costs, device: torch.device) -> int:
        """How many threads a stage's steps are given: as many as its largest piece of rows keeps busy."""
        if device.type != "cpu":
            return torch.get_num_threads()
        largest = max(tokens // pieces_of(tokens, settings.accumulate, device) for tokens in costs.tokens.values())
        return devices.threads_that_pay(largest // self.ranks.size, self.model.settings.width)

    def evaluate(self, stage: Stage, regular: bool) -> tuple[bool, bool]:
        """Score the model and remember the best: (is this the best so far, is it time to stop early). Of equals it is
        the last at which a `regular` checkpoint is saved: it has learned more."""
        task, state = stage.task, self.state
        try:
            with during("evaluation"), between_steps(), self.stops.at_once(self.ranks.size == 1):
                result = self.layout.evaluate(task)  # in float32, as whoever loads the run will see it
        except Stopped:
            return False, False
        numbers = {key: value for key, value in result.items() if isinstance(value, int | float)}
        shown = {key: value for key, value in numbers.items() if math.isfinite(value)}  # JSON has no others
        record = {"stage": stage.name, "step": state.step, "evaluation": shown}
        value = numbers.get(task.metric)
        if value is not None:
            where = "dev" if stage.final else "evaluation:"
            self.report.say(f"{stage.name}: {stage.at(state.step)}: {where} {scores({task.metric: value})[0]}")
        self.write(record)
        better = enough = state.unscored = False  # from here on it was made; what failed before is made again
        if value is not None and stage.final:
            best = state.best_value
            ahead = best is None or (value > best if task.higher_is_better else value < best)
            better = math.isfinite(value) and ahead
            if better or (value == best and regular):
                state.best_value, state.best_step = value, state.step
            state.since_best = 0 if better else state.since_best + 1
            enough = self.is_enough(stage)
        state.done = stage.final and (enough or state.step >= stage.end)
        self.show(record)
        if enough and state.step < stage.end:
            made = "one evaluation" if state.since_best == 1 else f"{state.since_best} evaluations"
            self.report.say(f"{stage.name}: no better score in {made}, stopping early")
        return better, enough

    def is_enough(self, stage: Stage) -> bool:
        """Whether there was no better score for as many evaluations as the stage has patience for."""
        return 0 < stage.settings.patience <= self.state.since_best

    def write(self, record: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl."""
        if self.ranks.leads:
            self.record.add(record)

    def show(self, record: dict[str, Any]) -> None:
        """To whoever watches, who may fail."""
        if self.ranks.leads:
            self.watch(record)


def due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def steps_after(step: int, last: int) -> str:
    return f"steps {step + 1:,} to {last:,}" if step + 1 < last else f"step {last:,}"


def dtype(precision: torch.dtype) -> str:
    return str(precision).removeprefix("torch.")
