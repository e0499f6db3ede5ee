"""A checkpoint's files while they are written."""

import pytest

from pipeline.record import checkpoint
from pipeline.rundir import RunDir


def test_a_checkpoint_has_its_name_only_when_it_is_complete(tmp_path):
    run = RunDir(tmp_path / "run").create()
    final = run.checkpoint(3)
    folders = []

    def save(folder):
        (folder / "weights").write_bytes(b"half")
        folders.append(folder)
        assert not final.exists() and run.checkpoint_steps() == []
        if len(folders) == 1:
            raise OSError("no space left on device")

    written = {"graph": "g", "steps": 3, "next_group": 0, "seed": 0, "save": save}
    with pytest.raises(OSError, match="no space"):
        checkpoint.write(run, **written)
    assert run.checkpoint_steps() == [], "an interrupted one is not found"
    assert checkpoint.write(run, **written)[0] == final
    assert run.checkpoint_steps() == [3] and checkpoint.read(run)[0] == final
    assert final not in folders and not folders[-1].exists()
