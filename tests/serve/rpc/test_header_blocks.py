"""A block that comes again is not decoded again, unless the table of fields has changed."""

from __future__ import annotations

import random

import hpack
import pytest

from exportkit.serve.rpc import http2_frames as h2
from exportkit.serve.rpc.http2_headers import HeaderBlocks

FIELDS = [(f"name-{number % 4}", f"value-{number}") for number in range(12)] + [(":method", "POST"), ("te", "trailers")]


@pytest.mark.parametrize("seed", range(20))
def test_fields_are_those_of_a_decoder_that_reads_every_block(seed: int):
    drawn = random.Random(seed)
    encoder, plain, blocks = hpack.Encoder(), hpack.Decoder(), HeaderBlocks()
    # Small tables drop entries. A client may repeat any block, whatever it says by then.
    encoder.header_table_size = drawn.choice([0, 45, 90, 200, 4096])
    sent: list[bytes] = []
    for number in range(1, 200, 2):
        if sent and drawn.random() < 0.6:
            block = sent[-1] if drawn.random() < 0.7 else drawn.choice(sent)
        else:
            chosen = drawn.choices(FIELDS, k=drawn.randint(1, 4))
            block = encoder.encode([(*field, drawn.random() < 0.1) for field in chosen])
        try:
            expected = [(bytes(name), bytes(value)) for name, value in plain.decode(block, raw=True)]
        except hpack.HPACKError:  # it names an entry that is gone
            with pytest.raises(h2.ConnectionProblemError):
                blocks.begin(h2.END_HEADERS, number, block)
            return
        sent.append(block)
        found = blocks.begin(h2.END_HEADERS, number, block)
        assert found is not None
        assert (found.number, found.fields) == (number, expected)
        found.fields.append((b"x", b"y"))  # the list is the caller's
