"""The tests of exportkit.transformers need transformers, which is an extra."""

import pytest

pytest.importorskip("transformers", reason="pip install -c constraints.txt 'exportkit[transformers]'")
