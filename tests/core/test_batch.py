import pytest
import torch

from flowrl.core import Batch, Totals

from .tables import LENGTHS, B, T, table, tensor


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mask": torch.ones(B)}, r"mask must be \[B,T\]"),
        ({"logp": torch.zeros(B, T + 1)}, r"Batch.logp must be \[B,T\] = \[8,6\]"),
        ({"token_kl": torch.zeros(B)}, "token_kl"),
        ({"reward": torch.zeros(B, 1, 1)}, "reward"),
        ({"reward": torch.zeros(3)}, "B = 8"),
        ({"group_id": torch.zeros(B)}, "integers"),
        ({"group_id": torch.zeros(B, 1, dtype=torch.int64)}, "group_id"),
        ({"valid": torch.ones(B)}, "bool"),
        ({"in_loss": torch.ones(2, dtype=torch.bool)}, "in_loss"),
        ({"seg": torch.zeros(B, T)}, "integers"),
        ({"totals": Totals(1, 1, torch.ones(3))}, "row_tokens"),
    ],
)
def test_wrong_shapes_and_types_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        table(**fields)


def test_totals_count_rows_that_hold_a_unit():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]])
    totals = Totals.of(mask)
    assert (totals.rows, totals.tokens, totals.row_tokens.tolist()) == (2.0, 5.0, [2.0, 0.0, 3.0])
    totals = Totals.of(mask, torch.tensor([True, True, False]))
    assert (totals.rows, totals.tokens, totals.row_tokens.tolist()) == (1.0, 2.0, [2.0, 0.0, 0.0])


def test_a_slice_keeps_the_totals_of_the_whole():
    valid = torch.tensor([True] * 7 + [False])
    extra = {"neg_logp": torch.zeros(B, T), "belief": torch.zeros(B, T), "answers": list("abcdefgh"), "k": 3}
    batch = table(valid=valid, extra=extra)
    part = batch.slice([1, 4], slice(2, 4))
    assert part.mask.shape == part.logp.shape == (2, 2)
    assert part.totals.rows == 7
    assert part.totals.tokens == sum(LENGTHS[:7])
    assert part.totals.row_tokens.tolist() == [LENGTHS[1], LENGTHS[4]]
    assert part.extra["neg_logp"].shape == (2, 2)
    assert part.extra["belief"].shape == (2, T)
    assert part.extra["answers"] == ["b", "e"]
    assert part.extra["k"] == 3
    again = part.slice(slice(1, 2))
    assert (again.totals.rows, again.totals.row_tokens.tolist()) == (7, [LENGTHS[4]])
    assert batch.slice(keep=torch.arange(B) == 0).totals.rows == 1


def test_clean_overwrites_what_is_outside_the_mask():
    batch = table(reward=tensor(*[float("nan")] * B), valid=torch.arange(B) > 0, seg=torch.ones(B, T).long())
    batch = batch.clean(batch.loss_mask, torch.float32)
    assert batch.logp.dtype == torch.float32
    assert torch.equal(batch.logp == 0, ~batch.loss_mask)
    assert torch.equal(batch.seg == -1, ~batch.loss_mask)
    assert batch.reward[0] == 0


def test_log_probs_are_not_needed_to_make_a_batch():
    batch = Batch(mask=torch.ones(2, 3), reward=torch.zeros(2), group_id=torch.zeros(2, dtype=torch.int32))
    assert not batch.has("logp")
    assert batch.loss_mask.all()
