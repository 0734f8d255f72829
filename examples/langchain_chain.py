"""Stream a chain of LangChain: `python examples/langchain_chain.py`."""

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="coppice-demo", temperature=0, max_tokens=32)  # of the server at OPENAI_BASE_URL
for part in (ChatPromptTemplate([("user", "Tell me about {thing}.")]) | model).stream({"thing": "a lamp"}):
    print(part.text, end="", flush=True)
