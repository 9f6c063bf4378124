"""What is known of schemas without torch: their one text, and which arguments no compiled code can pass."""

from __future__ import annotations

import re

NOT_PASSED = {
    "ComplexType": ("complex", "Write two floats, the real and the imaginary part, or a tensor."),
    "DictType": ("Dict", "Write one argument for each key, or a list whose order is fixed."),
    "TupleType": ("a tuple", "Write one argument for each part, or a list."),
    "AnyType": ("Any", "Write the type."),
    "ClassType": ("an object", "Take the object's tensors and numbers: a package cannot hold the object."),
}
"""The kinds of arguments that no compiled code can pass: the type's name, and what to write instead."""

_WRITTEN = re.compile(r"\(\$\d+! -> \)")


def schema_text(schema: object) -> str:
    """Returns the text of a torch.FunctionSchema; csrc/runtime/operators.cpp has the same.

    Torch cannot read back all that it prints, such as the default `Device d="cpu"`, so texts are compared and none is
    read. `Tensor!` is the one thing that it prints otherwise than a person writes it.
    """
    return _WRITTEN.sub("!", str(schema))
