"""The state machine of one request through an ensemble: examples, and properties of random graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.runtime.ensemble.execution import EnsembleExecution, StepCall, StepProgress
from moonpool.runtime.ensemble.graph import EnsembleGraph, Flow
from moonpool.runtime.model.config.ensembles import EnsembleScheduling, EnsembleStep
from moonpool.runtime.model.config.model import ModelConfig

Pairs = Mapping[str, str]


def graph(
    steps: Sequence[tuple[Pairs, Pairs]], inputs: Sequence[str], outputs: Sequence[str], *, decoupled: bool = False
) -> EnsembleGraph:
    def tensors(names: Sequence[str]) -> list[dict[str, object]]:
        return [{"name": name, "data_type": "TYPE_FP32", "dims": [1]} for name in names]

    raw = {"name": "e", "backend": "python", "input": tensors(inputs), "output": tensors(outputs)}
    config = ModelConfig.from_dict(raw).with_decoupled(decoupled)
    made = [
        EnsembleStep(f"m{number}", None, tuple(read.items()), tuple(written.items()))
        for number, (read, written) in enumerate(steps)
    ]
    return EnsembleGraph(config, EnsembleScheduling(tuple(made)))


CHAIN = graph([({"X": "A"}, {"Y": "t"}), ({"X": "t"}, {"Y": "B"})], ["A"], ["B"])
STREAM = graph([({"X": "A"}, {"Y": "t"}), ({"X": "t"}, {"Y": "B"})], ["A"], ["B"], decoupled=True)


def begun(flow: Flow, **tensors: str) -> tuple[EnsembleExecution[str], StepProgress[str]]:
    machine: EnsembleExecution[str] = EnsembleExecution(flow)
    return machine, machine.begin(tensors)


class TestOneResponse:
    def test_a_step_runs_when_the_one_before_has_answered(self) -> None:
        machine, first = begun(CHAIN.flow(), A="a")
        second = machine.respond(0, {"Y": "y"}, is_final=True)
        last = machine.respond(1, {"Y": "b"}, is_final=True)

        assert first == ([StepCall(0, {"X": "a"})], [], False, False)
        assert second == ([StepCall(1, {"X": "y"})], [], False, False)
        assert last == ([], [{"B": "b"}], True, False)

    def test_a_step_waits_for_all_tensors_that_it_reads(self) -> None:
        diamond = graph(
            [({"X": "A"}, {"Y": "t"}), ({"X": "A"}, {"Y": "u"}), ({"X": "t", "X2": "u", "X3": "A"}, {"Y": "B"})],
            ["A"],
            ["B"],
        )
        machine, first = begun(diamond.flow(), A="a")
        one = machine.respond(1, {"Y": "u"}, is_final=True)
        both = machine.respond(0, {"Y": "t"}, is_final=True)

        assert [call.step for call in first.calls] == [0, 1]
        assert one.calls == []
        assert both.calls == [StepCall(2, {"X": "t", "X2": "u", "X3": "a"})]

    def test_one_tensor_may_go_into_two_inputs_of_a_model(self) -> None:
        twice = graph([({"X": "A", "X2": "A"}, {"Y": "B"})], ["A"], ["B"])

        assert begun(twice.flow(), A="a")[1].calls == [StepCall(0, {"X": "a", "X2": "a"})]

    def test_the_response_waits_until_nothing_runs(self) -> None:
        """One step answers the caller, and another one, whose output it lacks, still runs."""
        two = graph([({"X": "A"}, {"Y": "B"}), ({"X": "A"}, {"Y": "C"})], ["A"], ["B", "C"])
        machine, _ = begun(two.flow(), A="a")

        assert machine.respond(0, {"Y": "b"}, is_final=True) == ([], [], False, False)
        assert machine.respond(1, {"Y": "c"}, is_final=True).responses == [{"B": "b", "C": "c"}]

    @pytest.mark.promise("Ensembles", "Steps behind outputs that nobody asked for do not run.")
    def test_steps_behind_outputs_that_nobody_wants_do_not_run(self) -> None:
        two = graph([({"X": "A"}, {"Y": "B"}), ({"X": "A"}, {"Y": "C"})], ["A"], ["B", "C"])

        assert [call.step for call in begun(two.flow(["C"]), A="a")[1].calls] == [1]

    def test_an_output_that_is_an_input_needs_no_step(self) -> None:
        through = graph([({"X": "A"}, {"Y": "B"})], ["A"], ["A", "B"])

        assert begun(through.flow(["A"]), A="a")[1] == ([], [{"A": "a"}], True, False)

    def test_an_absent_tensor_is_left_out_of_the_next_step(self) -> None:
        """The caller left out A2, and the first step answers without Z."""
        absent = graph(
            [({"X": "A", "X2": "A2"}, {"Y": "t", "Z": "u"}), ({"X": "t", "X2": "u"}, {"Y": "B"})],
            ["A", "A2"],
            ["B", "u"],
        )
        machine, first = begun(absent.flow(), A="a")
        second = machine.respond(0, {"Y": "y"}, is_final=True)
        last = machine.respond(1, {"Y": "b"}, is_final=True)

        assert first.calls == [StepCall(0, {"X": "a"})]
        assert second.calls == [StepCall(1, {"X": "y"})]
        assert last.responses == [{"B": "b"}]

    def test_an_end_without_a_response_is_a_deadlock(self) -> None:
        machine, _ = begun(CHAIN.flow(), A="a")

        assert machine.respond(0, None, is_final=True) == ([], [], True, True)


class TestManyResponses:
    @pytest.mark.promise(
        "Ensembles",
        "Each response of a decoupled model goes through the steps behind it by itself, and the caller gets one for "
        "each.",
    )
    def test_a_step_runs_once_for_each_response(self) -> None:
        machine, _ = begun(STREAM.flow(), A="a")
        first = machine.respond(0, {"Y": "y0"}, is_final=False)
        second = machine.respond(0, {"Y": "y1"}, is_final=True)
        out = machine.respond(1, {"Y": "b0"}, is_final=True)
        last = machine.respond(1, {"Y": "b1"}, is_final=True)

        assert first.calls == [StepCall(1, {"X": "y0"})]
        assert second.calls == [StepCall(1, {"X": "y1"})]
        assert out == ([], [{"B": "b0"}], False, False)
        assert last == ([], [{"B": "b1"}], True, False)

    def test_a_model_that_gives_nothing_ends_it_silently(self) -> None:
        machine, _ = begun(STREAM.flow(), A="a")

        assert machine.respond(0, None, is_final=True) == ([], [], True, False)

    def test_tensors_of_one_response_stay_together(self) -> None:
        """Two branches of one decoupled model meet again, and the slower one is an iteration behind."""
        branches = graph(
            [({"X": "A"}, {"Y": "t"}), ({"X": "t"}, {"Y": "u"}), ({"X": "t", "X2": "u"}, {"Y": "B"})],
            ["A"],
            ["B"],
            decoupled=True,
        )
        machine, _ = begun(branches.flow(), A="a")
        machine.respond(0, {"Y": "t0"}, is_final=False)
        machine.respond(0, {"Y": "t1"}, is_final=True)
        met = machine.respond(1, {"Y": "u0"}, is_final=True)

        assert met.calls == [StepCall(2, {"X": "t0", "X2": "u0"})]


class Shape(NamedTuple):
    """A graph of any form in which every step reads what is there before it, and each output is wanted."""

    graph: EnsembleGraph
    wanted: list[str]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    inputs = [f"i{number}" for number in range(draw(st.integers(1, 3)))]
    there = list(inputs)
    steps: list[tuple[Pairs, Pairs]] = []
    for number in range(draw(st.integers(1, 6))):
        read = draw(st.lists(st.sampled_from(there), min_size=1, max_size=3))
        written = [f"t{number}.{port}" for port in range(draw(st.integers(1, 2)))]
        ports = {f"X{port}": tensor for port, tensor in enumerate(read)}
        steps.append((ports, {f"Y{port}": tensor for port, tensor in enumerate(written)}))
        there += written
    outputs = draw(st.lists(st.sampled_from(there), min_size=1, max_size=4, unique=True))
    wanted = draw(st.lists(st.sampled_from(outputs), min_size=1, unique=True))
    return Shape(graph(steps, inputs, outputs), wanted)


def answer(call: StepCall[str], ports: Sequence[str]) -> dict[str, str]:
    """Return outputs that say what they were made of."""
    inputs = ",".join(f"{name}={value}" for name, value in sorted(call.inputs.items()))
    return {port: f"{call.step}.{port}({inputs})" for port in ports}


class Expected:
    """The tensors that an ensemble makes, computed from the outputs back."""

    def __init__(self, given: EnsembleGraph) -> None:
        self._graph = given
        self._writer = {
            tensor: (number, port) for number, step in enumerate(given.steps) for port, tensor in step.outputs
        }
        self.ran: set[int] = set()

    def tensor(self, name: str) -> str:
        if name not in self._writer:
            return name
        number, port = self._writer[name]
        self.ran.add(number)
        inputs = {port: self.tensor(read) for port, read in self._graph.steps[number].inputs}
        return answer(StepCall(number, inputs), [port])[port]


@given(shapes(), st.data())
def test_any_graph_gives_what_its_outputs_are_made_of_whatever_ends_first(shape: Shape, data: st.DataObject) -> None:
    machine: EnsembleExecution[str] = EnsembleExecution(shape.graph.flow(shape.wanted))
    names = [tensor.name for tensor in shape.graph.config.inputs]
    progress = machine.begin({name: name for name in names})
    running = list(progress.calls)
    ran = [call.step for call in running]
    while not progress.is_over:
        assert running
        call = running.pop(data.draw(st.integers(0, len(running) - 1)))
        ports = [port for port, _ in shape.graph.steps[call.step].outputs]
        progress = machine.respond(call.step, answer(call, ports), is_final=True)
        running += progress.calls
        ran += [each.step for each in progress.calls]
    expected = Expected(shape.graph)

    assert progress.responses == [{name: expected.tensor(name) for name in shape.wanted}]
    assert running == []
    # Each step that is needed ran once, and no other one.
    assert sorted(ran) == sorted(expected.ran)


@given(st.lists(st.integers(0, 3), max_size=6), st.data())
def test_nested_streams_give_a_response_for_each_of_each(counts: list[int], data: st.DataObject) -> None:
    """The first model gives len(counts) responses, and the second one counts[n] for the nth of them."""
    machine, progress = begun(STREAM.flow(), A="a")
    got: list[str] = []
    left: dict[str, int] = {}
    first = list(range(len(counts)))
    is_open = True
    while not progress.is_over:
        choices = list(left)
        if is_open:
            choices.append("first")
        choice = data.draw(st.sampled_from(choices))
        if choice == "first":
            if first:
                number = first.pop(0)
                progress = machine.respond(0, {"Y": f"t{number}"}, is_final=False)
                (call,) = progress.calls
                left[call.inputs["X"]] = counts[number]
            else:
                is_open = False
                progress = machine.respond(0, None, is_final=True)
        elif left[choice]:
            left[choice] -= 1
            progress = machine.respond(1, {"Y": choice}, is_final=False)
        else:
            del left[choice]
            progress = machine.respond(1, None, is_final=True)
        got += [response["B"] for response in progress.responses]

    assert sorted(got) == sorted(f"t{number}" for number, count in enumerate(counts) for _ in range(count))
    assert left == {}
    assert not progress.is_deadlock


def test_only_chains_are_chains() -> None:
    two = graph([({"X": "A"}, {"Y": "B"}), ({"X": "A"}, {"Y": "C"})], ["A"], ["B", "C"])
    through = graph([({"X": "A"}, {"Y": "B"})], ["A"], ["A", "B"])

    assert [number for number, *_ in CHAIN.flow().chain] == [0, 1]
    assert [number for number, *_ in two.flow(["C"]).chain] == [1]
    assert not two.flow().chain
    assert not through.flow().chain
    assert not through.flow(["A"]).chain
    assert not STREAM.flow().chain
