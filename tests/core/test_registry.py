import subprocess
import sys
from dataclasses import replace

import pytest

from flowrl.core import HOOKS, PRESETS, Algorithm, lookup, register


def test_every_hook_has_a_link_for_grpo():
    assert len(HOOKS) == 13  # the twelve hooks and the sub-hook `bounds`
    assert {hook for hook, links in Algorithm("grpo").links.items() if not links} == {"correction", "aux"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lookup("advantage", "zz"), "unknown advantage link 'zz'. Did you mean 'z'"),
        (lambda: lookup("advantages", "z"), "Did you mean 'advantage'"),
        (lambda: register("krl", "x"), "unknown hook"),
        (lambda: register("advantage", "z"), "registered already"),
        (lambda: Algorithm("flow_gpro"), "unknown preset 'flow_gpro'. Did you mean 'flow_grpo'"),
        (lambda: Algorithm("grpo", clip_low=0.1), "unknown setting 'clip_low'.*Did you mean 'clip_lo'"),
        (lambda: Algorithm("grpo", adv_clip_max=5), "unknown setting 'adv_clip_max'"),
        (lambda: Algorithm(replace(PRESETS["grpo"], cfg={"bta": 1})), "Did you mean 'beta'"),
        (lambda: Algorithm(replace(PRESETS["grpo"], advantage=("z", "loo"))), "must come first"),
        (lambda: Algorithm(replace(PRESETS["grpo"], advantage=("clip",))), "must follow"),
        (lambda: Algorithm(replace(PRESETS["grpo"], credit=())), "no credit link"),
        (lambda: Algorithm(replace(PRESETS["grpo"], aux=((1.0, "entrpy"),))), "Did you mean 'entropy'"),
    ],
)
def test_mistakes_are_named_with_a_suggestion(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_needs_are_those_of_the_active_links():
    assert Algorithm("grpo").needs == {"logp", "old_logp"}
    assert Algorithm("grpo", beta=0.1).needs == {"logp", "old_logp", "ref_logp"}
    assert Algorithm("flow_grpo").needs == {"logp", "old_logp", "token_kl"}
    assert Algorithm(replace(PRESETS["grpo"], needs=("scope",))).needs >= {"scope"}


def test_the_room_imports_torch_only():
    code = "import sys, flowrl.core; print(*{name.split('.')[0] for name in sys.modules}, 'flowrl.' + str("
    code += "sorted({n.split('.')[1] for n in sys.modules if n.startswith('flowrl.')})))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name in ("diffusers", "transformers", "accelerate", "peft", "PIL", "scipy", "open_clip"):
        assert name not in loaded.split()
    assert "flowrl.['core']" in loaded
