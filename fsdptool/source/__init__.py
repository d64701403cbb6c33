"""From a reference, as a person types it, to a :class:`~fsdptool.records.anatomy.ModelSpec`. Torch-free."""

from fsdptool.source.adapters import adapted, check_continues
from fsdptool.source.config_checks import check_consent, consented
from fsdptool.source.references import located, rebased, with_places
from fsdptool.source.resolve import resolve, resolve_choice
from fsdptool.source.weight_files import check_weights, weights_left_out

__all__ = [
    "adapted",
    "check_consent",
    "check_continues",
    "check_weights",
    "consented",
    "located",
    "rebased",
    "resolve",
    "resolve_choice",
    "weights_left_out",
    "with_places",
]
