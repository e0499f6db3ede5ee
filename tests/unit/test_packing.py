"""Packed rows without padding: ids, positions and targets, and the way back to a padded rectangle."""

import pytest
import torch

from ops.packing import Section, differing, keys_of, pack, rectangle


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


def test_a_shared_prompt_is_in_the_row_once() -> None:
    prompt, other = torch.tensor([7, 8]), torch.tensor([9])
    responses = [torch.tensor(ids) for ids in ([1, 2, 3], [4], [5, 6], [1, 2])]
    packed = pack([prompt, prompt, prompt, other], responses, shared=(3, 1))
    assert packed.ids_1S.tolist() == [[7, 8, 1, 2, 5, 9, 1]]
    assert packed.positions_1S.tolist() == [[0, 1, 2, 3, 2, 0, 1]]
    assert packed.keep_R.tolist() == [1, 2, 3, 1, 1, 4, 5, 6]
    assert packed.targets_1R.tolist() == [[1, 2, 3, 4, 5, 6, 1, 2]]
    assert packed.sections == (Section(2), Section(2, 0, 2), Section(1, 0, 2), Section(2))
    assert keys_of(packed.sections).tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 4, 5, 6]


def test_the_keys_of_a_segment_are_its_sample_up_to_its_end() -> None:
    """The same tokens and positions as in the row that computes each prompt, whatever the runs."""
    prompts = [torch.arange(n) + 100 * i for i, n in ((1, 3), (1, 3), (2, 1), (3, 4), (3, 4), (3, 4))]
    responses = [torch.arange(n) + 500 + 10 * n for n in (2, 5, 1, 1, 3, 2)]
    samples = [torch.cat([p, r[:-1]]).tolist() for p, r in zip(prompts, responses)]
    plain = pack(prompts, responses)
    assert [each.size for each in plain.sections] == [len(sample) for sample in samples]
    assert keys_of(plain.sections).tolist() == list(range(plain.ids_1S.shape[1]))
    for shared in ((2, 1, 3), (1, 1, 1, 3), (2, 1, 2, 1), (1,) * 6):
        row = pack(prompts, responses, shared)
        keys = keys_of(row.sections).split([each.before + each.size for each in row.sections])
        found = [row.ids_1S[0, key].tolist() for key in keys]
        assert all(row.positions_1S[0, key].tolist() == list(range(len(key))) for key in keys)
        assert all(text in found or len(response) == 1 for text, response in zip(samples, responses))
        assert row.ids_1S[0, row.keep_R].tolist() == plain.ids_1S[0, plain.keep_R].tolist()
        assert row.positions_1S[0, row.keep_R].tolist() == plain.positions_1S[0, plain.keep_R].tolist()
        assert torch.equal(row.targets_1R, plain.targets_1R)


def test_prompts_that_differ_are_not_shared() -> None:
    prompts = [torch.tensor(ids) for ids in ([1], [2, 3], [2, 3], [2, 4])]
    assert differing(prompts, (1, 2, 1)) is None
    assert differing(prompts, (1, 3)) == (1, 3)
    with pytest.raises(ValueError, match="samples 1 and 3 are to share a prompt"):
        pack(prompts, [torch.ones(1)] * 4, (1, 3))


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
