"""Operands against the file: one flipped bit anywhere fails, and only the casts that keep values pass."""

import ml_dtypes
import numpy as np
import pytest

from conformance.checkpoints.shared import shared
from conformance.judge import bits
from reference.checkpoint import open_checkpoint

LAYER = "model.language_model.layers.3."
PACKED = LAYER + "mlp.experts.5.up_proj.weight"
PLAIN = LAYER + "self_attn.q_a_proj.weight"
CONV = "model.language_model.layers.0.self_attn.q_conv1d.weight"
A_LOG = "model.language_model.layers.0.self_attn.A_log"


@pytest.fixture(scope="module", params=["nvidia", "libertai"])
def checkpoint(request):
    return open_checkpoint(shared(request.param, "tiny"))


def parts(checkpoint, name=PACKED):
    return {
        part: np.frombuffer(data, np.float32 if dtype == "F32" else np.uint8).reshape(shape).copy()
        for part, (dtype, shape, data) in (
            ("codes", checkpoint.raw(name)),
            ("scale", checkpoint.raw(f"{name}_scale")),
            ("scale_2", checkpoint.raw(f"{name}_scale_2")),
        )
    }


def test_the_files_own_parts_pass(checkpoint):
    rows = list(bits.rows(checkpoint, PACKED, parts(checkpoint)))
    assert [row.part for row in rows] == ["codes", "scale", "scale_2"]
    assert all(row.passed and row.compared > 0 and row.layer == 3 for row in rows)


@pytest.mark.parametrize("part", ["codes", "scale", "scale_2"])
def test_one_flipped_bit_is_found_and_named(checkpoint, part):
    bound = parts(checkpoint)
    flat = bound[part].reshape(-1).view(np.uint8)
    flat[-1] ^= 1
    failing = [row for row in bits.rows(checkpoint, PACKED, bound) if not row.passed]
    assert [(row.part, row.differing) for row in failing] == [(part, 1)]
    (value,) = failing[0].values
    assert value.expected_hex != value.actual_hex
    assert value.index == tuple(n - 1 for n in bound[part].shape)


def test_a_decoded_weight_passes_in_fp32_and_no_other_way(checkpoint):
    value = checkpoint.weight(PACKED)
    (row,) = bits.rows(checkpoint, PACKED, {"value": value})
    assert row.passed
    assert row.rule == "decoded to F32"
    for wrong in (value.astype(ml_dtypes.bfloat16), value.astype(np.float16), np.nextafter(value, np.inf)):
        (row,) = bits.rows(checkpoint, PACKED, {"value": wrong})
        assert not row.passed


@pytest.mark.parametrize(("name", "kind"), [(PLAIN, ml_dtypes.bfloat16), (PLAIN, np.float32), (A_LOG, np.float32)])
def test_casts_that_keep_every_value_pass(checkpoint, name, kind):
    (row,) = bits.rows(checkpoint, name, {"value": checkpoint.weight(name).astype(kind)})
    assert row.passed


@pytest.mark.parametrize("name", [PLAIN, A_LOG])
def test_casts_that_lose_values_fail(checkpoint, name):
    (row,) = bits.rows(checkpoint, name, {"value": checkpoint.weight(name).astype(np.float16)})
    assert not row.passed
    assert "float16" in row.message


def test_only_convolution_kernels_may_be_rounded_to_bf16(checkpoint):
    (row,) = bits.rows(checkpoint, CONV, {"value": checkpoint.weight(CONV).astype(ml_dtypes.bfloat16)})
    assert row.passed
    (row,) = bits.rows(checkpoint, A_LOG, {"value": checkpoint.weight(A_LOG).astype(ml_dtypes.bfloat16)})
    assert not row.passed


def test_one_ulp_and_the_sign_of_zero_count(checkpoint):
    value = checkpoint.weight(A_LOG)
    value[0] = np.nextafter(value[0], np.float32(np.inf))
    (row,) = bits.rows(checkpoint, A_LOG, {"value": value})
    assert (row.passed, row.differing) == (False, 1)
    packed = checkpoint.weight(PACKED)
    zeros = np.argwhere(packed == 0)
    packed[tuple(zeros[0])] *= -1
    (row,) = bits.rows(checkpoint, PACKED, {"value": packed})
    assert (row.passed, row.differing) == (False, 1)


def test_a_view_without_the_unit_axis_passes_and_a_transposed_one_fails(checkpoint):
    (row,) = bits.rows(checkpoint, CONV, {"value": checkpoint.weight(CONV)[:, 0]})
    assert row.passed
    (row,) = bits.rows(checkpoint, PLAIN, {"value": checkpoint.weight(PLAIN).T})
    assert not row.passed
    assert "shape" in row.message


@pytest.mark.parametrize(
    "bound", [{"codes": np.zeros(1, np.uint8)}, {"weights": np.zeros(1)}, {"value": np.zeros(1), "scale": np.zeros(1)}]
)
def test_parts_that_do_not_belong_fail(checkpoint, bound):
    (row,) = bits.rows(checkpoint, PACKED, bound)
    assert not row.passed
    assert (row.compared, row.differing) == (0, 0)


def test_a_part_of_the_wrong_width_fails(checkpoint):
    bound = parts(checkpoint)
    bound["scale_2"] = bound["scale_2"].astype(np.float64)
    bound["codes"] = bound["codes"].astype(np.int32)
    assert [row.passed for row in bits.rows(checkpoint, PACKED, bound)] == [False, True, False]


def test_every_weight_of_the_text_stack_is_asked_for(checkpoint):
    asked = []
    rows = list(bits.compare(checkpoint, lambda name: asked.append(name)))
    assert rows == []
    assert asked == bits.weights(checkpoint)
    assert "lm_head.weight" in asked
    assert any(name.endswith(".hc_attn_scale") for name in asked)
    parts = (".weight_scale", ".weight_scale_2", ".input_scale")
    assert not any(name.endswith(parts) or "visual" in name or ".layers.9." in name for name in asked)
    per_layer = {name.split(".")[3] for name in asked if ".layers." in name}
    assert per_layer == {str(i) for i in range(checkpoint.config.text.num_hidden_layers)}


def test_a_weight_that_the_engine_does_not_hold_is_not_compared(checkpoint):
    def operands(name):
        raise KeyError(name)

    assert list(bits.compare(checkpoint, operands, [PLAIN])) == []
