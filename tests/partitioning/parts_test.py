"""A part of the batch knows which one it is, and holds whole groups or is refused."""

import pytest

from switch_tf import context, partitioning


def test_outside_of_any_scope_there_is_one_part():
    assert context.current().part == (1, 0)
    assert partitioning.share_of_groups(7) == 7


def test_a_part_has_its_share_of_the_groups():
    with partitioning.part_of_batch(4, 3):
        assert context.current().part == (4, 3)
        assert partitioning.share_of_groups(8) == 2


def test_scopes_nest_and_are_left_after_an_error():
    with partitioning.part_of_batch(4, 1):
        with pytest.raises(KeyError), partitioning.part_of_batch(2, 0):
            raise KeyError
        assert context.current().part == (4, 1)
    assert context.current().part == (1, 0)


def test_parts_that_would_cut_a_group_are_refused():
    message = (r"A batch routed in 6 groups cannot be cut into 4 parts of whole groups "
               r"\(microbatches times devices of the data axis\)\. Set num_groups_multiple to a multiple of 4, or use "
               r"fewer of them\.")
    with pytest.raises(ValueError, match=message):
        partitioning.check_parts(6, 4)
    with partitioning.part_of_batch(4, 0), pytest.raises(ValueError, match=message):
        partitioning.share_of_groups(6)
    partitioning.check_parts(8, 4)
