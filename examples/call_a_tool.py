"""Ask a model that `quantkit serve` serves to call a tool, and answer with the tool's result.

    quantkit serve ./my-chat-model &
    python examples/call_a_tool.py http://127.0.0.1:8000/v1

It needs `quantkit-lm[serve]` for the server and `openai` for this client.
"""

import json
import sys
from typing import Any

from openai import OpenAI

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
WEATHER = {"Oslo": "-3 degrees, clear", "Rome": "14 degrees, rain"}


def main(url: str = "http://127.0.0.1:8000/v1", key: str = "none") -> None:
    """Print the tool call and the model's answer to its result."""
    client = OpenAI(base_url=url, api_key=key)
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    first = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], tool_choice="required", max_tokens=300, temperature=0
    )
    message = first.choices[0].message
    for call in message.tool_calls or []:
        city = json.loads(call.function.arguments)["city"]
        print(f"{call.function.name}({city})")
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": WEATHER[city]}]
    last = client.chat.completions.create(model=model, messages=messages, max_tokens=60, temperature=0)
    print(last.choices[0].message.content)


if __name__ == "__main__":
    main(*sys.argv[1:])
