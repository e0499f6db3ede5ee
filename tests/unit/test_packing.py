"""Packed rows without padding: ids, positions and targets, and the way back to a padded rectangle."""

import pytest
import torch

from ops.packing import pack, rectangle


def test_a_row_holds_the_samples_one_after_the_other() -> None:
    packed = pack([torch.tensor([7, 8]), torch.tensor([9])], [torch.tensor([1, 2, 3]), torch.tensor([4])])
    assert packed.ids_1S.tolist() == [[7, 8, 1, 2, 9]]
    assert packed.positions_1S.tolist() == [[0, 1, 2, 3, 0]]
    assert packed.keep_R.tolist() == [1, 2, 3, 4]
    assert packed.targets_1R.tolist() == [[1, 2, 3, 4]]


def test_each_target_follows_the_position_that_predicts_it() -> None:
    prompts = [torch.arange(n) + 100 for n in (3, 1, 4)]
    responses = [torch.arange(n) + 200 for n in (2, 5, 1)]
    packed = pack(prompts, responses)
    at = 0
    for prompt, response in zip(prompts, responses):
        whole = torch.cat([prompt, response]).tolist()
        for token in response.tolist():
            position = int(packed.positions_1S[0, packed.keep_R[at]])
            assert int(packed.ids_1S[0, packed.keep_R[at]]) == whole[position]
            assert whole[position + 1] == token == int(packed.targets_1R[0, at])
            at += 1


@pytest.mark.parametrize(("prompt", "response"), [(0, 1), (1, 0)])
def test_a_sample_without_tokens_is_refused(prompt: int, response: int) -> None:
    with pytest.raises(ValueError, match=f"sample 1 has {prompt} prompt and {response} response tokens"):
        pack([torch.ones(1), torch.ones(prompt)], [torch.ones(1), torch.ones(response)])


def test_a_rectangle_has_each_sample_in_its_row() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    found = rectangle(values, (1, 3), 4)
    assert found.tolist() == [[1, 0, 0, 0], [2, 3, 4, 0]]
    (found * torch.arange(8.0).view(2, 4)).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [0, 4, 5, 6]


@pytest.mark.parametrize(("lengths", "width"), [((1, 2), 4), ((1, 3), 2)])
def test_lengths_that_do_not_fit_are_refused(lengths: tuple[int, ...], width: int) -> None:
    with pytest.raises(ValueError, match="4 entries are not rows of"):
        rectangle(torch.zeros(4), lengths, width)
