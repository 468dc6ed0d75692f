"""`hushgrad audit noise` tells the usual noise from ours."""

import json

from typer.testing import CliRunner

from hushgrad.cli import app


def test_the_table_names_every_noise_and_attack() -> None:
    result = CliRunner().invoke(app, ["audit", "noise", "--trials", "2", "--draws", "65536"])
    assert result.exit_code == 0
    for words in ("torch.randn", "no grid", "hushgrad", "angle lattice"):
        assert words in result.output


def test_json_has_the_scores() -> None:
    arguments = ["audit", "noise", "--trials", "4", "--draws", "65536", "--json"]
    facts = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert facts["float32, torch.randn"]["radius lattice"] == 1.0
    assert facts["float64, no grid"]["low bits of float64"] == 1.0
    assert facts["hushgrad"]["largest radius"] > 4
