"""The first thing a run does: is this our environment, is there an inventory. With the real ansible-playbook."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def playbook(*words: str, program: Path = BIN / "ansible-playbook") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ANSIBLE_NOCOLOR": "1"}
    return subprocess.run(
        [str(program), *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif((ROOT / "inventories" / "production").exists(), reason="the operator has an inventory")
def test_no_inventory_yet_is_one_sentence() -> None:
    answer = playbook("site.yml", "-l", "h100-sg")
    assert answer.returncode == 2
    (line,) = answer.stderr.strip().splitlines()
    assert "inventories/production does not exist yet; copy inventories/example to inventories/production" in line
    assert "PLAY" not in answer.stdout


def test_another_environment_is_refused_before_anything(tmp_path: Path) -> None:
    # An environment with the same Ansible and without gpuready, as a distribution's or a colleague's would be.
    venv.create(tmp_path / "other", symlinks=True, with_pip=False)
    site = next((tmp_path / "other" / "lib").glob("python*/site-packages"))
    ours = next((BIN.parent / "lib").glob("python*/site-packages"))
    for entry in ours.iterdir():
        if "gpuready" not in entry.name:
            (site / entry.name).symlink_to(entry)
    program = tmp_path / "other" / "bin" / "ansible-playbook"
    program.write_text(f"#!{tmp_path}/other/bin/python\nfrom ansible.cli.playbook import main\nmain()\n")
    program.chmod(0o755)
    answer = playbook("-i", "inventories/sim", "site.yml", "-l", "h100-sg", program=program)
    assert answer.returncode == 2
    (line,) = [line for line in answer.stderr.splitlines() if line.startswith("[ERROR]")]
    assert f"ansible-playbook runs in {tmp_path}/other, which is not gpuready's environment" in line
    assert "scripts/setup" in line
    assert "PLAY" not in answer.stdout


def test_syntax_check_needs_no_servers() -> None:
    assert playbook("site.yml", "--syntax-check").returncode == 0
