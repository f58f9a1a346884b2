"""Placement of a mixture whose experts stay whole on the tensor-parallel axis (expert tensor parallel 1): each rank routes its own
part of the sequence, and expert parallel reaches over tp. Needs sequence parallel. Torch-free.

Megatron-Core's folding of expert parallel over attention's tensor parallel (arXiv 2504.14960 §3.1).
"""

from __future__ import annotations

from profiler.opset import OpClass, op_class_of
from profiler.placement_walk import Placer, State, Walk
from specs.graph import Op


class TokenSplitPlacer(Placer):
    """Like its base, but flattened tokens stay split over the ranks through router, dispatch and experts."""

    def _step(self, op: Op, walk: Walk) -> None:
        refs = op.input_refs()
        found = {walk.states[ref].placement for ref in refs}
        if op_class_of(op.target) in (OpClass.INDEX, OpClass.REDUCTION) and found - {None} and not self._columns(refs, walk):
            # rows stay where they are; what is summed over the tokens is each rank's own (rows of each expert)
            placement = 0 if found <= {0, None} else None
            self._emit(op, walk, placement)
            return
        super()._step(op, walk)

    def _columns(self, refs: list[str], walk: Walk) -> bool:
        return any(walk.states[ref].column for ref in refs)

    def _view(self, op: Op, refs: list[str], walk: Walk) -> None:
        """``(B, S, H) <-> (B S, H)``: the tokens of a rank are the same either way."""
        state, before, after = walk.states[refs[0]], self._shape(refs[0]), op.outputs[0].shape
        merged = len(before) == 3 and len(after) == 2 and before[0] * before[1] == after[0]
        parted = len(before) == 2 and len(after) == 3 and after[0] * after[1] == before[0]
        if not state.column and ((merged and state.placement == 1) or (parted and state.placement == 0)):
            walk.states[op.outputs[0].name] = State(0 if merged else 1)
            return
        super()._view(op, refs, walk)

    def _product(self, op: Op, refs: list[str], walk: Walk) -> None:
        """Products of flattened tokens keep their weights whole; those that every rank holds get partial gradients."""
        state = walk.states[refs[0]]
        if state.column or state.placement != 0 or len(self._shape(refs[0])) != 2:
            super()._product(op, refs, walk)
            return
        if op_class_of(op.target) != OpClass.GROUPED_GEMM:
            walk.partial |= {ref for ref in refs[1:] if ref in self.params}
        self._emit(op, walk, 0)
