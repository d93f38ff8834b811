"""`train_with_auto_recovery` in one process: every kind of failure, and that the end is the same as without it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ftlab.checkpoint import tree
from ftlab.checkpoint.distributed import DistributedCheckpointManager
from ftlab.checkpoint.manager import CheckpointManager
from ftlab.config import HealthConfig
from ftlab.elastic.seeding import mix, seed_step
from ftlab.errors import BadPolicy, ConfigError, OutOfMemory, RecoveryExhausted
from ftlab.health.monitor import HealthMonitor
from ftlab.policy import LowerRate, Retry, Rollback, Snapshot, Wait, decide
from ftlab.train.autorecovery import Outcome, train_with_auto_recovery
from ftlab.train.guard import PATIENCE, Book

SEED, EPOCHS, BATCHES, ROWS = 7, 3, 6, 8
STEPS = EPOCHS * BATCHES


class Run:
    """A small model with everything that a failed step may leave a trace in, and a plain loop that trains it."""

    def __init__(self, folder: Path, plain_layers: bool = False) -> None:
        torch.manual_seed(3)
        mixing = nn.LayerNorm(8) if plain_layers else nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.3))
        self.model = nn.Sequential(nn.Linear(4, 8), mixing, nn.ReLU(), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, 0.9)
        self.x, self.y = torch.randn(BATCHES * ROWS, 4), torch.randn(BATCHES * ROWS, 2)
        self.loader = DataLoader(TensorDataset(self.x, self.y), batch_size=ROWS, shuffle=True)
        self.folder, self.forwards = folder, 0
        self.disturb: Callable[[int, torch.Tensor], None] = lambda number, x: None
        self.model.register_forward_pre_hook(self._before)

    def _before(self, module: nn.Module, args: tuple[torch.Tensor]) -> None:
        self.forwards += 1
        self.disturb(self.forwards, args[0])

    def train_epoch(self, model: nn.Module, loader: Any, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        total = 0.0
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.scheduler.step()
            total += loss.item()
        return {"loss": total / len(loader)}

    def train(self, **options: Any) -> Outcome:
        given = {"train_epoch": self.train_epoch, "checkpoints": self.folder, "seed": SEED, "epochs": EPOCHS,
                 "parts": {"scheduler": self.scheduler}, **options}
        return train_with_auto_recovery(model=self.model, optimizer=self.optimizer, loader=self.loader, **given)

    def train_plainly(self, lacking: Collection[tuple[int, int]] = (), epochs: int = EPOCHS) -> str:
        """The same loop with nothing around it but the seeding; the digest of how it ends."""
        for epoch in range(epochs):
            seed_step(mix(SEED, 0x0D), epoch, 0)
            for number, (x, y) in enumerate(self.loader):
                seed_step(SEED, epoch * BATCHES + number, 0)
                if (epoch, number) not in lacking:
                    self.train_epoch(self.model, [(x, y)], self.optimizer)
        return self.digest()

    def digest(self) -> str:
        """All that training changes."""
        return tree.digest([self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # sums depend on it
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


@pytest.fixture
def undisturbed(tmp_path: Path) -> str:
    return Run(tmp_path / "twin").train_plainly()


def once(at: int, action: Callable[[torch.Tensor], Any]) -> Callable[[int, torch.Tensor], None]:
    def disturb(number: int, x: torch.Tensor) -> None:
        if number == at:
            action(x)
    return disturb


def poison(x: torch.Tensor) -> None:
    x[0, 0] = math.nan


def fail(x: torch.Tensor) -> None:
    raise ValueError("a wire is loose")


def actions(outcome: Outcome) -> list[str]:
    return [each.action.split("(")[0] for each in outcome.recoveries]


# ---- nothing happens


def test_undisturbed_training_ends_in_the_same_bits_as_the_plain_loop(run, undisturbed):
    outcome = run.train()
    assert run.digest() == undisturbed
    assert (outcome.steps, outcome.skipped, outcome.recoveries, outcome.pieces) == (STEPS, [], [], 1)
    assert len(outcome.metrics) == EPOCHS and all(math.isfinite(each["loss"]) for each in outcome.metrics)
    assert run.forwards == STEPS


@pytest.mark.parametrize("kind", [str, CheckpointManager, DistributedCheckpointManager])
def test_checkpoints_go_to_a_folder_or_through_a_manager_that_stays_open(run, undisturbed, kind):
    checkpoints = kind(str(run.folder))
    run.train(checkpoints=checkpoints)
    assert run.digest() == undisturbed
    manager = getattr(checkpoints, "manager", checkpoints)
    if isinstance(manager, CheckpointManager):
        manager.save({"more": {}}, 99, wait=True)
        manager.close()
    with CheckpointManager(str(run.folder)) as reader:
        assert STEPS in [entry.step for entry in reader.entries() if entry.good]


def test_a_finished_run_is_not_trained_again(run, tmp_path, undisturbed):
    first = run.train()
    again = Run(run.folder)
    outcome = again.train()
    assert again.forwards == 0 and again.digest() == undisturbed
    assert outcome.metrics == first.metrics


# ---- bad numbers


def test_a_nan_that_comes_once_is_mended_by_trying_again_and_leaves_no_trace(run, undisturbed, caplog):
    run.disturb = once(9, poison)
    with caplog.at_level(logging.WARNING, "ftlab.train.autorecovery"):
        outcome = run.train()
    assert run.forwards == STEPS + 1, "the fault fired"
    assert actions(outcome) == ["Retry"] and outcome.recoveries[0].step == 8
    assert "gradient norm is NaN" in outcome.recoveries[0].reason and "gradient norm is NaN" in caplog.text
    assert run.digest() == undisturbed and outcome.skipped == []


def test_a_batch_with_a_nan_in_its_data_is_skipped_and_named(run, tmp_path):
    run.x[5, 1] = math.nan
    outcome = run.train()
    assert actions(outcome) == ["Retry", "Skip"] * EPOCHS
    assert len(outcome.skipped) == EPOCHS and [epoch for epoch, _ in outcome.skipped] == list(range(EPOCHS))
    twin = Run(tmp_path / "twin")
    assert run.digest() == twin.train_plainly(lacking=outcome.skipped)
    assert all(math.isfinite(value) for value in twin.model.state_dict()["0.weight"].flatten().tolist())


def test_when_the_last_batch_of_an_epoch_is_skipped_the_next_epoch_begins(run, tmp_path):
    run.disturb = lambda number, x: poison(x) if number in (BATCHES, BATCHES + 1) else None
    outcome = run.train()
    assert outcome.skipped == [(0, BATCHES - 1)]
    assert outcome.metrics[0] == {} and len(outcome.metrics) == EPOCHS
    assert run.digest() == Run(tmp_path / "twin").train_plainly(lacking=[(0, BATCHES - 1)])


def test_a_loss_that_the_loop_shows_to_the_monitor_counts_before_it_reaches_the_gradients(run, undisturbed):
    monitor, shown = HealthMonitor(), []

    def train_epoch(model: nn.Module, loader: Any, optimizer: Any) -> None:
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            shown.append(loss.item())
            monitor.detect_nan_inf(math.inf if len(shown) == 5 else loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.scheduler.step()

    outcome = run.train(train_epoch=train_epoch, monitor=monitor)
    assert actions(outcome) == ["Retry"] and outcome.recoveries[0].reason == "the loss is Inf"
    assert run.digest() == undisturbed and monitor.step == STEPS, "the monitor was told of each step"


def test_a_gradient_that_is_far_too_large_is_bad_too(run):
    monitor = HealthMonitor(config=HealthConfig(grad_spike=30.0, settle=5))
    run.disturb = once(13, lambda x: x.mul_(1e7))
    run.model[1][0].eval()  # else BatchNorm would take the size away again
    twin = Run(run.folder.parent / "other")
    twin.model[1][0].eval()
    outcome = run.train(monitor=monitor)
    assert actions(outcome) == ["Retry"] and "deviations above" in outcome.recoveries[0].reason
    assert run.digest() == twin.train_plainly()


def test_a_loss_of_an_epoch_that_is_nan_has_the_epoch_done_again(run, undisturbed):
    calls: list[int] = []

    def train_epoch(model: nn.Module, loader: Any, optimizer: Any) -> dict[str, float]:
        calls.append(1)
        metrics = run.train_epoch(model, loader, optimizer)
        return {"loss": math.nan} if len(calls) == 2 else metrics

    outcome = run.train(train_epoch=train_epoch)
    assert [(each.cause, each.step) for each in outcome.recoveries] == [("numbers", 2 * BATCHES)]
    assert run.forwards == STEPS + BATCHES and run.digest() == undisturbed


def test_numbers_that_stay_bad_end_in_recovery_exhausted(run):
    run.disturb = lambda number, x: poison(x) if number > 3 else None
    with pytest.raises(RecoveryExhausted, match="NaN") as caught:
        run.train(budgets={"numbers": 5})
    assert caught.value.cause == "numbers" and len(caught.value.history) == 5
    assert all(parameter.isfinite().all() for parameter in run.model.parameters())


def test_the_learning_rate_can_be_lowered(run):
    run.disturb = once(4, poison)
    outcome = run.train(policy=lambda snapshot, budgets: LowerRate(factor=0.25))
    assert outcome.skipped == [(0, 3)]
    twin = Run(run.folder.parent / "other")
    twin.train_plainly()
    rates = [each.optimizer.param_groups[0]["lr"] for each in (run, twin)]
    assert rates[0] == pytest.approx(rates[1] / 4, rel=0.2), "and stays so over the scheduler's steps"


# ---- exceptions


@pytest.mark.parametrize("at", [1, 4, BATCHES + 1, STEPS])
@pytest.mark.parametrize("every", [None, 2])
def test_an_exception_that_comes_once_is_mended_from_a_checkpoint(run, undisturbed, at, every):
    run.disturb = once(at, fail)
    outcome = run.train(every=every)
    assert actions(outcome) == ["Rollback"] and "a wire is loose" in outcome.recoveries[0].reason
    back = (at - 1) % (every or BATCHES)
    assert run.forwards == STEPS + 1 + back, "it went back to the newest checkpoint, and no further"
    assert run.digest() == undisturbed


def test_an_exception_after_the_last_batch_is_mended_too(run, undisturbed):
    calls: list[int] = []

    def train_epoch(model: nn.Module, loader: Any, optimizer: Any) -> dict[str, float]:
        metrics = run.train_epoch(model, loader, optimizer)
        calls.append(1)
        if len(calls) == 2:
            raise OSError("the disk for the logs is full")
        return metrics

    assert actions(run.train(train_epoch=train_epoch)) == ["Rollback"]
    assert run.digest() == undisturbed


def test_an_exception_that_always_comes_is_raised_itself_after_the_budget(run):
    run.disturb = lambda number, x: fail(x) if number >= 4 else None
    with pytest.raises(ValueError, match="a wire is loose") as caught:
        run.train()
    assert "3 recoveries were tried" in caught.value.__notes__[0]
    assert any("fail" in line.name for line in caught.traceback), "with its own traceback"
    twin = Run(run.folder.parent / "other")
    twin.disturb = once(4, fail)
    with pytest.raises(ValueError):
        twin.train_plainly()


def test_an_optimizer_that_fails_halfway_has_the_state_come_from_a_checkpoint(run, undisturbed):
    """Weights are changed and nobody can undo that: trying again would take the step one and a half times."""
    real, calls = run.optimizer.step, []

    def step(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 9:
            with torch.no_grad():
                run.model[0].weight.add_(1.0)
            raise MemoryError("no room for the moments")
        return real(*args)

    run.optimizer.step = step
    outcome = run.train(policy=lambda snapshot, budgets: Retry())
    assert actions(outcome) == ["Retry"] and outcome.recoveries[0].cause == "oom"
    assert run.digest() == undisturbed


def test_a_keyboard_interrupt_goes_through_and_the_next_call_resumes_to_the_same_end(run, undisturbed):
    def interrupt(x: torch.Tensor) -> None:
        raise KeyboardInterrupt

    run.disturb = once(9, interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.train(every=4)
    again = Run(run.folder)
    outcome = again.train(every=4)
    assert again.forwards == STEPS - 8 and again.digest() == undisturbed
    assert outcome.steps == STEPS and len(outcome.metrics) == EPOCHS


def test_a_dataset_that_fails_once_is_asked_again(run, undisturbed):
    class Data(TensorDataset):
        left = 1

        def __getitem__(self, index: int) -> Any:
            if index == 11 and Data.left:
                Data.left -= 1
                raise OSError("the share is gone")
            return super().__getitem__(index)

    run.loader = DataLoader(Data(run.x, run.y), batch_size=ROWS, shuffle=True)
    assert actions(run.train()) == ["Rollback"] and run.digest() == undisturbed


# ---- memory


def too_large(rows: int) -> Callable[[int, torch.Tensor], None]:
    def disturb(number: int, x: torch.Tensor) -> None:
        if len(x) > rows:
            raise MemoryError(f"{len(x)} rows do not fit")
    return disturb


def test_a_batch_that_does_not_fit_is_cut_until_it_does_and_this_is_remembered(tmp_path):
    twin, run = Run(tmp_path / "twin", plain_layers=True), Run(tmp_path / "run", plain_layers=True)
    twin.train_plainly()
    run.disturb = too_large(3)
    outcome = run.train(epochs=2)
    assert actions(outcome) == ["Split", "Split"] and outcome.pieces == 4
    assert {each.cause for each in outcome.recoveries} == {"oom"}
    resumed = Run(tmp_path / "run", plain_layers=True)
    resumed.disturb = too_large(3)
    end = resumed.train()
    assert end.recoveries == [] and end.pieces == 4, "the next process does not have to learn it again"
    for left, right in zip(resumed.model.parameters(), twin.model.parameters(), strict=True):
        assert torch.allclose(left, right, atol=1e-5)
    assert [each["loss"] for each in end.metrics] == pytest.approx([each["loss"] for each in twin_metrics(tmp_path)])


def twin_metrics(folder: Path) -> list[dict[str, Any]]:
    return Run(folder / "whole", plain_layers=True).train().metrics


def test_a_sample_that_does_not_fit_ends_in_out_of_memory(run):
    run.disturb = too_large(0)
    with pytest.raises(OutOfMemory, match="one sample at a time") as caught:
        run.train()
    assert isinstance(caught.value.__cause__, MemoryError)


def test_statistics_of_a_cut_batch_count_once(tmp_path):
    run, twin = Run(tmp_path / "run"), Run(tmp_path / "twin")
    run.disturb = too_large(4)
    run.train()
    twin.train_plainly()
    cut, whole = run.model[1][0], twin.model[1][0]
    assert cut.num_batches_tracked == whole.num_batches_tracked == STEPS
    assert torch.allclose(cut.running_mean, whole.running_mean, atol=0.3)


def test_after_many_good_steps_larger_pieces_are_tried_and_if_they_fail_later_each_time():
    book = Book(10, [])
    book.cut()
    book.cut()
    waits = []
    for _ in range(3):
        steps = 0
        while book.pieces == 4:
            book.step_done()
            steps += 1
        waits.append(steps)
        assert book.pieces == 2
        book.cut()
    assert waits == [PATIENCE, 2 * PATIENCE, 4 * PATIENCE]
    copy = Book(10, [])
    copy.load_state_dict(book.state_dict())
    assert copy.state_dict() == book.state_dict()


# ---- checkpoints


def test_a_poisoned_checkpoint_is_condemned_and_an_older_one_used(run, undisturbed):
    run.train(epochs=2)
    bad = Run(run.folder)
    with CheckpointManager(str(run.folder)) as manager:
        state = {"model": bad.model, "optimizer": bad.optimizer, "scheduler": bad.scheduler,
                 "recovery": Book(BATCHES, [])}
        manager.load_latest(state)
        bad.model[0].weight.data[0, 0] = math.nan
        name = manager.save(state, 2 * BATCHES, wait=True)
    resumed = Run(run.folder)
    outcome = resumed.train()
    assert actions(outcome)[:2] == ["Retry", "Rollback"] and "condemn=True" in outcome.recoveries[1].action
    assert resumed.digest() == undisturbed
    with CheckpointManager(str(run.folder)) as manager:
        [entry] = [entry for entry in manager.entries() if entry.name == name]
        assert entry.status == "set aside" and "right after it" in entry.reason


def test_going_back_so_many_steps_takes_an_older_checkpoint_and_turns_away_from_the_newer(run, undisturbed):
    run.disturb = once(10, poison)
    outcome = run.train(every=2, policy=lambda snapshot, budgets: Rollback(steps=4))
    assert actions(outcome) == ["Rollback"]
    assert run.forwards == STEPS + 1 + 5, "from step 9 to the checkpoint of step 4"
    assert run.digest() == undisturbed


def test_a_checkpoint_of_epochs_of_another_length_is_refused(run):
    run.train(epochs=1)
    other = Run(run.folder)
    other.loader = DataLoader(TensorDataset(other.x, other.y), batch_size=ROWS // 2)
    with pytest.raises(ConfigError, match="epochs of 6 batches, the loader gives 12"):
        other.train()


# ---- policies


def refuses(snapshot: Snapshot, budgets: Any) -> Any:
    raise LookupError("no idea")


@pytest.mark.parametrize(("policy", "why"), [
    (refuses, "the policy raised LookupError: no idea"),
    (lambda snapshot, budgets: "Retry", "it is no Action"),
    (lambda snapshot, budgets: Wait(), "a step needs one of"),
    (lambda snapshot, budgets: Rollback(condemn=True), "no checkpoint was loaded"),
], ids=["raises", "a word", "waits", "condemns"])
def test_a_policy_without_a_usable_answer_leaves_the_last_committed_step(run, tmp_path, policy, why):
    run.disturb = once(BATCHES + 1, poison)
    with pytest.raises(BadPolicy, match=why):
        run.train(policy=policy)
    assert run.digest() == Run(tmp_path / "twin").train_plainly(epochs=1)


def test_a_policy_that_always_tries_again_is_ended_by_the_budget(run):
    run.disturb = lambda number, x: fail(x) if number > 2 else None
    with pytest.raises(ValueError, match="a wire is loose"):
        run.train(policy=lambda snapshot, budgets: Retry(), budgets={"crash": 6})
    assert run.forwards == 2 + 7


def test_the_policy_sees_what_happened(run):
    seen: list[tuple[Snapshot, dict[str, int]]] = []

    def policy(snapshot: Snapshot, budgets: Any) -> Any:
        seen.append((snapshot, dict(budgets)))
        return decide(snapshot, budgets)

    run.x[5, 1] = math.nan
    run.train(policy=policy, epochs=1)
    (first, budget), (second, later) = seen
    assert (first.tries, second.tries) == (0, 1) and later["numbers"] == budget["numbers"] - 1
    assert first.members == ("self",) and first.since_load is None and first.saved == 0
    assert first.failures[0].cause == "numbers" and first.can_split


# ---- loops of all kinds


def test_a_loop_may_accumulate_gradients_over_batches(run, tmp_path):
    def train_epoch(model: nn.Module, loader: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        for number, (x, y) in enumerate(loader):
            (nn.functional.mse_loss(model(x), y) / 3).backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()

    run.train(train_epoch=train_epoch)
    twin = Run(tmp_path / "twin")
    for epoch in range(EPOCHS):
        seed_step(mix(SEED, 0x0D), epoch, 0)
        for number, (x, y) in enumerate(twin.loader):
            seed_step(SEED, epoch * BATCHES + number, 0)
            (nn.functional.mse_loss(twin.model(x), y) / 3).backward()
            if number % 3 == 2:
                twin.optimizer.step()
                twin.optimizer.zero_grad()
    assert run.digest() == twin.digest()


def test_a_loop_may_scale_its_loss(run, undisturbed):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=10_000)

    def train_epoch(model: nn.Module, loader: Any, optimizer: Any) -> None:
        for x, y in loader:
            optimizer.zero_grad()
            scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            run.scheduler.step()

    outcome = run.train(train_epoch=train_epoch, parts={"scheduler": run.scheduler, "scaler": scaler})
    assert run.digest() == undisturbed, "a power of two leaves no trace"
    assert outcome.recoveries == []


def test_a_loop_may_break_off_and_is_called_again_for_the_rest(run, undisturbed):
    def train_epoch(model: nn.Module, loader: Any, optimizer: Any) -> dict[str, float]:
        return run.train_epoch(model, [next(iter(loader))], optimizer)

    outcome = run.train(train_epoch=train_epoch)
    assert run.digest() == undisturbed and outcome.steps == STEPS


def test_a_loop_that_takes_no_batch_is_told(run):
    with pytest.raises(ConfigError, match="without having taken a batch"):
        run.train(train_epoch=lambda model, loader, optimizer: None)


def test_a_step_outside_of_the_loop_is_told(run):
    def train_epoch(model: nn.Module, loader: Any, optimizer: Any) -> None:
        optimizer.step()

    with pytest.raises(ConfigError, match="once into the loop"):
        run.train(train_epoch=train_epoch)


def test_the_loader_and_the_optimizer_look_like_the_real_ones(run):
    def train_epoch(model: nn.Module, loader: Any, optimizer: Any) -> dict[str, float]:
        assert isinstance(optimizer, torch.optim.AdamW) and optimizer.param_groups is run.optimizer.param_groups
        assert loader.batch_size == ROWS and len(loader) == BATCHES
        return run.train_epoch(model, loader, optimizer)

    assert run.train(train_epoch=train_epoch).recoveries == []


def test_a_loader_without_a_length_is_told(run):
    run.loader = iter([])
    with pytest.raises(ConfigError, match="no length"):
        run.train()


def test_settings_that_cannot_work_are_told(run):
    with pytest.raises(ConfigError, match="every"):
        run.train(every=0)
    with pytest.raises(ConfigError, match="unknown budget"):
        run.train(budgets={"crashes": 1})
    with pytest.raises(ConfigError, match="model"):
        run.train(parts={"model": run.scheduler})
