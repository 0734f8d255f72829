"""Chat on the terminal with OpenAI's client, until an empty line: `python examples/chat.py`."""

from openai import OpenAI

client = OpenAI()  # of the server at OPENAI_BASE_URL
(served,) = client.models.list()
messages = []
while line := input("> "):
    messages.append({"role": "user", "content": line})
    answer = client.chat.completions.create(model=served.id, messages=messages, temperature=0, max_tokens=32)
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    print(messages[-1]["content"])
