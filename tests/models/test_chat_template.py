"""Chat templates against transformers; what they refuse is an error of the request."""

import pytest
import transformers
from tokenizer_cases import CHAT, PLAIN, TEMPLATES, trained

from scute_jax.models.chat_template import render_chat
from scute_jax.models.errors import ModelError
from scute_jax.models.tokenizer import Tokenizer


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name, prompt):
    special = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"}
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained(), chat_template=TEMPLATES[name], **special
    )
    ours = Tokenizer(trained(), special, TEMPLATES[name])
    text = ours.apply_chat_template(CHAT, prompt)
    assert text == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
    assert ours.encode_chat(CHAT, prompt) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    "template, messages, message",
    [
        (PLAIN, [], "at least one"),
        (PLAIN, "hi", "must be a list"),
        (PLAIN, ["hi"], "a message is 'hi'"),
        (PLAIN, [{"content": "hi"}], "with a role"),
        (PLAIN, [{"role": "user", "content": object()}], "holds a object"),
        ("{{ raise_exception('roles must alternate') }}", CHAT, "roles must alternate"),
        ("{% for %}", CHAT, "TemplateSyntaxError"),
        ("{{ messages.x.y }}", CHAT, "UndefinedError"),
        ("{{ 1 / 0 }}", CHAT, "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", CHAT, "SecurityError"),
        ("{{ messages.append(1) }}", CHAT, "SecurityError"),
        ("{{ namespace(__class__=1) }}", CHAT, "SecurityError"),
    ],
)
def test_what_a_template_refuses_is_an_error_of_the_request(template, messages, message):
    with pytest.raises(ModelError, match=message):
        render_chat(template, messages, True, {})


def test_a_model_without_a_template_says_so():
    with pytest.raises(ModelError, match="no chat template: send a prompt"):
        Tokenizer(trained()).encode_chat(CHAT)
