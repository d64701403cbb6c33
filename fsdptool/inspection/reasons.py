"""The closed lists of reasons. A code is stable within a major version; the text may change."""

from __future__ import annotations

REASONS: dict[str, str] = {
    # chosen
    "repeated_block": "repeated side by side in a list and not inside another chosen block",
    "repeated_in_stages": "the repeated block inside stages or wrappers that hold little else",
    "hint": "the family names it, with its reason",
    "person": "given with --wrap",
    # left
    "inside_block": "lies inside a chosen block",
    "stage": "a stage or wrapper: the blocks inside it hold nearly all of its parameters",
    "container": "a bare container: its class name would match every other container",
    "expert": "one expert of a mixture: a unit of its own would gather each expert alone",
    "once": "occurs once: nothing repeats",
    "unlisted": "repeated, but not side by side in a list: a part of something else",
    "different_each": "no two instances have the same shapes",
    "helper": "a small helper without inner structure beside real blocks",
    "too_small": "below half a percent of the parameters: a collective of its own costs more than it saves",
    "passed_over": "the person or the family chose other classes",
    "excluded": "left out with --exclude",
}
"""Why a class was chosen as a wrap class, or left."""

CONCERNS: dict[str, str] = {
    "no_repeated_block": "no class repeats: nothing can be wrapped by class",
    "shared_block": "one block is applied many times: it is one unit, gathered for every application",
    "mostly_embedding": "embedding tables hold the parameters; FSDP2 gathers a table whole",
    "convolutional_stages": "convolutional stages of different widths: no two blocks are alike",
    "few_blocks": "so few blocks that each is a large part of the model",
    "large_head": "one layer outside the blocks (a head, a projection) holds the parameters",
    "uneven_blocks": "blocks of one class differ so much in size that one dominates",
    "shared_parameters": "parameters shared between blocks must be one unit",
    "many_parts": "parameters outside the blocks add up although no single one is large",
}
"""Why one unit keeps 35 % or more of the parameters whatever is wrapped."""

NO_SPLIT_STATUSES = ("right", "unsuitable", "absent")
