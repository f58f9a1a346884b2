"""An exported program as a flat :class:`profiler.trace.Trace`.

What the export adds for its own sake is left out: size queries become ``{"expr": ...}``, checks vanish, a cast to the dtype
that a tensor already has is the tensor itself, in-place calls get their functional name, and the bodies of ``no_grad`` and
``autocast`` regions are inlined (tensors enter a ``no_grad`` region through ``aten.detach``, so that no gradient is counted).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from profiler.capture_export import Axes
from profiler.capture_sizes import SizeTable
from profiler.trace import Trace, TracedOp, TracedParam, param_ref
from specs.errors import InvalidInput
from specs.graph import DTYPE_BYTES, TensorSpec

CHECKS = frozenset(
    (
        "_assert_tensor_metadata", "_assert_async", "_assert_scalar", "_functional_assert_async", "sym_constrain_range",
        "sym_constrain_range_for_size",
    )
)  # fmt: skip
CASTS = frozenset(("to", "type_as", "_to_copy", "alias", "lift_fresh", "lift_fresh_copy"))
PLACEMENT_KWARGS = frozenset(("device", "layout", "pin_memory", "memory_format", "generator"))


def trace_of(program: ExportedProgram, model: nn.Module, axes: Axes, name: str) -> Trace:
    """The flat trace; raises :class:`InvalidInput` for a size that is no polynomial and for a result that is no scalar."""
    return _Tracer(program, model, axes, name).run()


@dataclass(frozen=True, slots=True)
class _Size:
    """A size computed from shapes; turned into an expression where an op uses it."""

    value: Any


class _Tracer:
    def __init__(self, program: ExportedProgram, model: nn.Module, axes: Axes, name: str) -> None:
        self.program, self.axes, self.name = program, axes, name
        self.sizes = SizeTable()
        self.ops: list[TracedOp] = []
        self.params: dict[str, TracedParam] = {}
        self.values: dict[Node, Any] = {}  # what a node stands for: a ref, a size expression, or a list of refs
        self.renamed: dict[str, str] = {}  # a tensor written in place -> the result that replaces it
        self.names: set[str] = set()
        self.owners, self.aliases = _owners(model)
        self.trainable = {fqn for fqn, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
        self.used: dict[str, dict[str, None]] = {}  # a shared parameter's first name -> the names that it is read by

    def run(self) -> Trace:
        placeholders = [node for node in self.program.graph.nodes if node.op == "placeholder"]
        inputs = self._inputs(placeholders)
        for node, spec in zip(placeholders, self.program.graph_signature.input_specs, strict=True):
            if spec.kind != InputKind.USER_INPUT:
                self._param(node, spec)
        results = self._walk(self.program.graph_module, "")
        loss = self._loss(results)
        return Trace(inputs, self._kept_params(), self.ops, loss, self._tied())

    def _kept_params(self) -> dict[str, TracedParam]:
        """Of a parameter with several names those that are read, or its first one."""
        dropped = {
            param_ref(alias)
            for owner, aliases in self.aliases.items()
            for alias in aliases
            if alias not in self.used.get(owner, {owner: None})
        }
        return {ref: param for ref, param in self.params.items() if ref not in dropped}

    def _tied(self) -> tuple[tuple[str, str], ...]:
        """(alias, owner) for parameters that are read by several names; the owner is the first name that is read."""
        pairs = []
        for owner, names in self.used.items():
            first = owner if owner in names else next(iter(names))
            pairs += [(name, first) for name in names if name != first]
        return tuple(sorted(pairs))

    # --- inputs and parameters --------------------------------------------------------------------------------------

    def _inputs(self, placeholders: list[Node]) -> tuple[TensorSpec, ...]:
        specs = self.program.graph_signature.input_specs
        nodes = [node for node, spec in zip(placeholders, specs, strict=True) if spec.kind == InputKind.USER_INPUT]
        tensors = [node for node in nodes if isinstance(node.meta.get("val"), Tensor)]
        for node in tensors:
            for dim, axis in self.axes.get(node.name, {}).items():
                self.sizes.learn(node.meta["val"].shape[dim], axis)
        self.names.update(node.name for node in tensors)
        for node in tensors:
            self.values[node] = {"ref": node.name}
        return tuple(self._tensor(node.name, node.meta["val"], f"input '{node.name}'") for node in tensors)

    def _param(self, node: Node, spec: Any) -> None:
        value = node.meta["val"]
        constant = spec.kind == InputKind.CONSTANT_TENSOR
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            return
        buffer = spec.kind != InputKind.PARAMETER
        fqn = self.owners.get(spec.target, spec.target)
        for alias in self.aliases.get(fqn, (fqn,)):
            self.params[param_ref(alias)] = TracedParam(
                fqn=alias, shape=tuple(int(size) for size in value.shape), dtype=_dtype(value.dtype),
                trainable=not buffer and alias in self.trainable, buffer=buffer, constant=constant,
            )  # fmt: skip
        self.values[node] = {"param": fqn}

    def _param_at(self, fqn: str, module_path: str) -> dict[str, str]:
        """A shared parameter goes by the name that it has in the module which reads it."""
        names = self.aliases.get(fqn, (fqn,))
        name = next((alias for alias in names if alias.rpartition(".")[0] == module_path), fqn)
        self.used.setdefault(fqn, {})[name] = None
        return {"ref": param_ref(name)}

    # --- nodes ------------------------------------------------------------------------------------------------------

    def _walk(self, module: GraphModule, outer_path: str) -> Any:
        for node in module.graph.nodes:
            if node.op == "call_function":
                self._call(module, node, _module_path(node) or outer_path)
            elif node.op == "output":
                return node.args[0]
        return ()

    def _call(self, module: GraphModule, node: Node, path: str) -> None:
        if node.target is operator.getitem:
            source = self.values[node.args[0]]  # type: ignore[index]
            self.values[node] = source[node.args[1]]  # type: ignore[index]
        elif _is_size(node.meta.get("val")):
            self.values[node] = _Size(node.meta["val"])
        elif str(node.target) in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            self._region(module, node, path)
        elif isinstance(node.target, torch._ops.OpOverload):
            self._op(node, path)
        else:
            raise InvalidInput.single(
                "unsupported_node", f"'{node.target}' in module '{path}' is no ATen op", subject=f"model {self.name}"
            )

    def _region(self, module: GraphModule, node: Node, path: str) -> None:
        """Inline the body of a ``with torch.no_grad()`` / ``autocast`` block."""
        bodies = [index for index, arg in enumerate(node.args) if isinstance(arg, Node) and arg.op == "get_attr"]
        body = module.get_submodule(str(node.args[bodies[0]].target))  # type: ignore[union-attr]
        arguments = node.args[bodies[0] + 1 :]
        no_grad = "set_grad" in str(node.target) and node.args[0] is False
        if not isinstance(body, GraphModule):
            raise InvalidInput.single("unsupported_node", f"'{node.target}' has no traced body", subject=f"model {self.name}")
        for placeholder, argument in zip((n for n in body.graph.nodes if n.op == "placeholder"), arguments, strict=True):
            value = self.values[argument] if isinstance(argument, Node) else argument
            if no_grad and isinstance(value, dict):
                value = self._detached(argument, value, path)
            self.values[placeholder] = value
        results = self._walk(body, path)
        self.values[node] = [self.values[result] if isinstance(result, Node) else result for result in results]

    def _detached(self, node: Any, value: dict[str, str], path: str) -> dict[str, str]:
        name = self._fresh("detach")
        output = self._tensor(name, node.meta["val"], f"'{name}' in module '{path}'")
        self.ops.append(TracedOp("aten.detach.default", (self._resolved(value, path),), {}, (output,), path))
        return {"ref": name}

    def _op(self, node: Node, path: str) -> None:
        target, base, overload = _target(node.target)
        if base in CHECKS:
            return
        args = tuple(self._argument(arg, path, base) for arg in node.args)
        kwargs = {key: self._argument(arg, path, base) for key, arg in node.kwargs.items() if key not in PLACEMENT_KWARGS}
        if self._same_tensor(node, base):
            self.values[node] = args[0]
            return
        in_place = base.endswith("_") and not base.startswith("__")
        if in_place:
            target = f"aten.{base.removesuffix('_')}.{overload}"
        outputs, value = self._outputs(node, base.removesuffix("_") if in_place else base, path)
        self.ops.append(TracedOp(target, args, kwargs, outputs, path))
        self.values[node] = value
        if in_place:
            self.renamed[args[0]["ref"]] = outputs[0].name

    def _same_tensor(self, node: Node, base: str) -> bool:
        """A cast to the same dtype, or dropout that drops nothing, hands its input on."""
        source = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], Node) else None
        result = node.meta.get("val")
        if not isinstance(source, Tensor) or not isinstance(result, Tensor) or source.dtype != result.dtype:
            return False
        if base == "dropout":
            return node.args[1] == 0 or node.args[2] is False
        if base == "contiguous":
            return bool(source.is_contiguous())
        return base in CASTS

    def _argument(self, value: Any, path: str, op: str) -> Any:
        if isinstance(value, Node):
            value = self.values[value]
        if isinstance(value, dict):
            return self._resolved(value, path)
        if isinstance(value, _Size):
            return self._size(value, f"op '{op}' in module '{path}'")
        if isinstance(value, (list, tuple)):
            return [self._argument(item, path, op) for item in value]
        if isinstance(value, torch.dtype):
            return _dtype(value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
            return None
        raise InvalidInput.single(
            "unsupported_argument", f"op '{op}' in module '{path}' has the argument {value!r}", subject=f"model {self.name}"
        )

    def _size(self, size: _Size, what: str) -> Any:
        if isinstance(size.value, (bool, int, float)):
            return size.value
        expr = self.sizes.expr(size.value, what=what)
        return expr(1, 1) if expr.is_const else {"expr": str(expr)}

    def _resolved(self, value: dict[str, str], path: str) -> dict[str, str]:
        """The reference by its current name: the alias that fits the module, the result of the last in-place write."""
        if "param" in value:
            value = self._param_at(value["param"], path)
        name = value["ref"]
        while name in self.renamed:
            name = self.renamed[name]
        return {"ref": name}

    def _outputs(self, node: Node, base: str, path: str) -> tuple[tuple[TensorSpec, ...], Any]:
        name = self._fresh(base)
        what = f"op '{base}' in module '{path}'"
        result = node.meta.get("val")
        if isinstance(result, Tensor):
            return (self._tensor(name, result, what),), {"ref": name}
        parts = [self._tensor(f"{name}.{index}", part, what) for index, part in enumerate(result or ()) if isinstance(part, Tensor)]
        if len(parts) != len(result or ()):
            raise InvalidInput.single("unsupported_result", f"{what} returns {result!r}", subject=f"model {self.name}")
        return tuple(parts), [{"ref": part.name} for part in parts]

    def _tensor(self, name: str, value: Tensor, what: str) -> TensorSpec:
        shape = tuple(self.sizes.expr(size, what=what) for size in value.shape)
        dtype = _dtype(value.dtype)
        if dtype not in DTYPE_BYTES:
            raise InvalidInput.single(
                "unsupported_dtype", f"{what} has dtype {dtype}", subject=f"model {self.name}", actual=dtype,
                allowed=sorted(DTYPE_BYTES),
            )  # fmt: skip
        return TensorSpec(name=name, shape=shape, dtype=dtype)

    def _fresh(self, base: str) -> str:
        name, count = base, 0
        while name in self.names:
            count += 1
            name = f"{base}_{count}"
        self.names.add(name)
        return name

    def _loss(self, results: Any) -> str:
        nodes = [node for node in (results if isinstance(results, (list, tuple)) else [results]) if isinstance(node, Node)]
        for node in nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor) and value.dim() == 0 and value.dtype.is_floating_point:
                return self._resolved(self.values[node], "")["ref"]
        shapes = [list(map(str, getattr(node.meta.get("val"), "shape", ()))) for node in nodes]
        raise InvalidInput.single(
            "no_scalar_loss",
            f"forward returns tensors of shape {shapes}; it must return the mean loss, a scalar, as its only or first result",
            subject=f"model {self.name}",
        )


def _owners(model: nn.Module) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Every parameter and buffer name -> the first name of the same tensor; and the first name -> all names."""
    first: dict[int, str] = {}
    owner: dict[str, str] = {}
    for fqn, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        owner[fqn] = first.setdefault(id(tensor), fqn)
    names: dict[str, list[str]] = {}
    for fqn, own in owner.items():
        names.setdefault(own, []).append(fqn)
    return owner, {own: tuple(every) for own, every in names.items()}


def _module_path(node: Node) -> str:
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def _target(op: torch._ops.OpOverload) -> tuple[str, str, str]:
    """``aten.linear.default``, ``linear``, ``default``."""
    namespace, base = op._schema.name.split("::")
    return f"{namespace}.{base}.{op._overloadname}", base, op._overloadname


def _is_size(value: Any) -> bool:
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def _dtype(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return "float8" if name.startswith("float8") else name
