"""Folding a flat trace into unique blocks and the segments that repeat them. No torch.

Two units are one block when their ops are the same: targets, arguments, shapes, parameter names within the module, and which
earlier result each argument is. Neighbouring units of one block make one segment when each passes its results only to the
next one, always the same way (``carry``), and everything else that they read is the same tensor for all (``bind``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from profiler.fold_units import Unit, split_named, split_repeated
from profiler.trace import Trace, TracedOp, map_refs
from specs.graph import Block, ModelGraph, Op, ParamSpec, Segment, TensorSpec


def fold(
    trace: Trace,
    *,
    name: str,
    source: str,
    unit_prefixes: Sequence[str] | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> ModelGraph:
    """The model graph of a trace, costs not yet filled in.

    ``unit_prefixes``: module paths of the units where the model names them itself; otherwise repeated containers are searched.
    """
    folder = _Folder(trace)
    units = split_named(trace.ops, unit_prefixes) if unit_prefixes else []
    return folder.graph(units or split_repeated(trace.ops, folder.key), name, source, dict(attributes or {}))


@dataclass(frozen=True)
class _Interface:
    """What a unit reads and makes, in order of first use, by trace-wide names."""

    inputs: tuple[str, ...]
    params: tuple[str, ...]
    made: tuple[str, ...]


@dataclass
class _Run:
    """Units ``first`` to ``last`` in a row as one segment; ``carry``: input position -> position among the tensors made."""

    first: int
    last: int
    carry: dict[int, int] = field(default_factory=dict)


class _Folder:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.tensors: dict[str, TensorSpec] = {tensor.name: tensor for tensor in trace.inputs}
        for op in trace.ops:
            self.tensors.update({tensor.name: tensor for tensor in op.outputs})

    # --- equality of units ------------------------------------------------------------------------------------------

    def interface(self, unit: Unit) -> _Interface:
        """Inputs, parameters and results of a unit."""
        made = {tensor.name: None for op in unit.ops for tensor in op.outputs}
        read = dict.fromkeys(ref for op in unit.ops for ref in op.refs() if ref not in made)
        return _Interface(
            inputs=tuple(ref for ref in read if ref not in self.trace.params),
            params=tuple(ref for ref in read if ref in self.trace.params),
            made=tuple(made),
        )

    def key(self, unit: Unit) -> str:
        """Text that is equal for two units exactly when they are the same block."""
        interface = self.interface(unit)
        names = {ref: f"made {index}" for index, ref in enumerate(interface.made)}
        names.update({ref: f"input {index}" for index, ref in enumerate(interface.inputs)})
        names.update({ref: f"param {index}" for index, ref in enumerate(interface.params)})
        content = {
            "container": unit.container,
            "inputs": [_form(self.tensors[ref]) for ref in interface.inputs],
            "params": [self._param_form(ref, unit) for ref in interface.params],
            "ops": [_op_form(op, names, unit) for op in unit.ops],
        }
        return json.dumps(content, sort_keys=True)

    def _param_form(self, ref: str, unit: Unit) -> list[Any]:
        param = self.trace.params[ref]
        label = "constant" if param.constant else _within(param.fqn, unit)
        return [label, param.shape, param.dtype, param.trainable, param.buffer]

    # --- the graph --------------------------------------------------------------------------------------------------

    def graph(self, units: Sequence[Unit], name: str, source: str, attributes: dict[str, Any]) -> ModelGraph:
        keys = [self.key(unit) for unit in units]
        faces = [self.interface(unit) for unit in units]
        readers = self._readers(faces)
        outputs = _block_outputs(keys, faces, readers)
        blocks: dict[str, Block] = {}
        for unit, key, face in zip(units, keys, faces, strict=True):
            if key not in blocks:
                label = _unique(_block_name(unit), {block.name for block in blocks.values()})
                blocks[key] = self._block(unit, face, outputs[key], label)
        segments, values = self._segments(units, keys, faces, readers, blocks)
        read = {ref for face in faces for ref in face.params}
        unused = sorted(param.fqn for ref, param in self.trace.params.items() if not param.buffer and ref not in read)
        if unused:
            attributes["unused_parameters"] = unused
        return ModelGraph(
            name=name, source=source, inputs=self.trace.inputs, blocks=tuple(blocks.values()), segments=tuple(segments),
            loss=values[self.trace.loss], tied=self.trace.tied, attributes=attributes,
        )  # fmt: skip

    def _readers(self, faces: Sequence[_Interface]) -> dict[str, set[int]]:
        """Tensor -> numbers of the units that read it; the loss is read from outside (-1)."""
        readers: dict[str, set[int]] = {self.trace.loss: {-1}}
        for number, face in enumerate(faces):
            for ref in face.inputs:
                readers.setdefault(ref, set()).add(number)
        return readers

    def _block(self, unit: Unit, face: _Interface, outputs: Sequence[int], name: str) -> Block:
        names = _local_names(unit, face, self.trace)
        params = []
        for index, ref in enumerate(face.params):
            param = self.trace.params[ref]
            fqn = f"{unit.prefix}.constant_{index}".lstrip(".") if param.constant else param.fqn
            params.append(
                ParamSpec(
                    name=names[ref], fqn=_templated(fqn, unit), shape=param.shape, dtype=param.dtype,
                    trainable=param.trainable, buffer=param.buffer,
                )
            )  # fmt: skip
        return Block(
            name=name,
            inputs=tuple(self.tensors[ref].replace(name=names[ref]) for ref in face.inputs),
            params=tuple(params),
            ops=tuple(_op(op, names, unit) for op in unit.ops),
            outputs=tuple(names[face.made[position]] for position in outputs),
        )

    def _segments(
        self,
        units: Sequence[Unit],
        keys: Sequence[str],
        faces: Sequence[_Interface],
        readers: Mapping[str, set[int]],
        blocks: Mapping[str, Block],
    ) -> tuple[list[Segment], dict[str, str]]:
        values = {tensor.name: tensor.name for tensor in self.trace.inputs}
        segments = []
        for run in _runs(units, keys, faces, readers):
            block, first, last = blocks[keys[run.first]], faces[run.first], faces[run.last]
            names = _local_names(units[run.first], first, self.trace)
            bind = {_name(block, position): values[ref] for position, ref in enumerate(first.inputs)}
            produces = {}
            for position, ref in enumerate(last.made):
                if any(reader > run.last or reader == -1 for reader in readers.get(ref, ())):
                    local = names[first.made[position]]
                    values[ref] = _unique(f"{block.name}.{local}", set(values.values()))
                    produces[local] = values[ref]
            carry = {_name(block, slot): names[first.made[position]] for slot, position in run.carry.items()}
            segments.append(
                Segment(
                    block=block.name, count=run.last - run.first + 1, first_index=units[run.first].index or 0, bind=bind,
                    carry=carry, produces=produces,
                )
            )  # fmt: skip
        return segments, values


def _runs(units: Sequence[Unit], keys: Sequence[str], faces: Sequence[_Interface], readers: Mapping[str, set[int]]) -> list[_Run]:
    runs: list[_Run] = []
    for number in range(len(units)):
        if not (runs and keys[number] == keys[number - 1] and _extend(runs[-1], number, units, faces, readers)):
            runs.append(_Run(number, number))
    return runs


def _extend(run: _Run, number: int, units: Sequence[Unit], faces: Sequence[_Interface], readers: Mapping[str, set[int]]) -> bool:
    """Append unit ``number`` to the run if it continues the chain; see the module docstring."""
    before, unit = units[number - 1], units[number]
    if unit.index is None or before.index is None or unit.container != before.container or unit.index != before.index + 1:
        return False
    if any(readers.get(ref, {number}) != {number} for ref in faces[number - 1].made):
        return False
    made = {ref: position for position, ref in enumerate(faces[number - 1].made)}
    carry = {}
    for slot, (earlier, ref) in enumerate(zip(faces[number - 1].inputs, faces[number].inputs, strict=True)):
        if ref in made:
            carry[slot] = made[ref]
        elif ref != earlier:
            return False
    if run.last > run.first and carry != run.carry:
        return False
    run.last, run.carry = number, carry
    return True


def _block_outputs(keys: Sequence[str], faces: Sequence[_Interface], readers: Mapping[str, set[int]]) -> dict[str, tuple[int, ...]]:
    """Positions among a block's tensors that something outside any of its instances reads."""
    positions: dict[str, set[int]] = {key: set() for key in keys}
    for key, face in zip(keys, faces, strict=True):
        positions[key].update(position for position, ref in enumerate(face.made) if ref in readers)
    return {key: tuple(sorted(found)) for key, found in positions.items()}


# --- names ----------------------------------------------------------------------------------------------------------


def _local_names(unit: Unit, face: _Interface, trace: Trace) -> dict[str, str]:
    """Trace-wide name -> name within the block: parameters by their path in the module, results by op and count."""
    model_inputs = {tensor.name for tensor in trace.inputs}
    names: dict[str, str] = {}
    for index, ref in enumerate(face.params):
        param = trace.params[ref]
        names[ref] = f"constant_{index}" if param.constant else _within(param.fqn, unit)
    for index, ref in enumerate(face.inputs):
        names[ref] = _unique(ref if ref in model_inputs else f"input_{index}", set(names.values()))
    taken = set(names.values())
    for op in unit.ops:
        stem = _unique(op.target.split(".")[1], taken)
        taken.add(stem)
        for index, tensor in enumerate(op.outputs):
            names[tensor.name] = stem if tensor.name.rpartition(".")[2] != str(index) else f"{stem}.{index}"
        taken.update(names[tensor.name] for tensor in op.outputs)
    return names


def _name(block: Block, position: int) -> str:
    return block.inputs[position].name


def _op(op: TracedOp, names: dict[str, str], unit: Unit) -> Op:
    outputs = tuple(tensor.replace(name=names[tensor.name]) for tensor in op.outputs)
    return Op(
        name=outputs[0].name.partition(".")[0] if outputs else op.target, target=op.target,
        args=tuple(map_refs(list(op.args), names)), kwargs={key: map_refs(value, names) for key, value in op.kwargs.items()},
        outputs=outputs, module_path=_templated(op.module_path, unit),
    )  # fmt: skip


def _op_form(op: TracedOp, names: dict[str, str], unit: Unit) -> list[Any]:
    kwargs = {key: map_refs(value, names) for key, value in op.kwargs.items()}
    outputs = [_form(tensor) for tensor in op.outputs]
    return [op.target, map_refs(list(op.args), names), kwargs, outputs, _within(op.module_path, unit)]


def _form(tensor: TensorSpec) -> list[str]:
    return [*map(str, tensor.shape), tensor.dtype]


def _within(path: str, unit: Unit) -> str:
    """The path seen from the unit's module; a path outside it stays whole."""
    if unit.prefix and path.startswith(unit.prefix + "."):
        return path[len(unit.prefix) + 1 :]
    return "" if path == unit.prefix else path


def _templated(path: str, unit: Unit) -> str:
    """The path with ``{i}`` for the unit's number in its container."""
    if unit.index is None or not (path == unit.prefix or path.startswith(unit.prefix + ".")):
        return path
    return f"{unit.container}.{{i}}".lstrip(".") + path[len(unit.prefix) :]


def _block_name(unit: Unit) -> str:
    if unit.prefix:
        last = (unit.container if unit.index is not None else unit.prefix).rpartition(".")[2]
        return last if last and not last.isdigit() else "block"
    firsts = {op.module_path.partition(".")[0] for op in unit.ops if op.module_path}
    only = next(iter(firsts)) if len(firsts) == 1 else ""
    return only if only and not only.isdigit() else "model"


def _unique(name: str, taken: set[str]) -> str:
    candidate, count = name, 0
    while candidate in taken:
        count += 1
        candidate = f"{name}_{count}"
    return candidate
