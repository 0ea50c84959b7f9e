"""Tools and schemas by released clients, which read and check the replies, and send calls and results back."""

from __future__ import annotations

import json
from collections.abc import Callable
from subprocess import CompletedProcess
from typing import Any

import pytest

pytestmark = pytest.mark.clients

START = """
import json
from typing import Literal
from pydantic import BaseModel

class Weather(BaseModel):
    "Return the weather in a city."
    city: str
    unit: Literal["C", "F"]

class Fact(BaseModel):
    capital: str
    sure: bool

URL, MODEL = "http://127.0.0.1:8000/v1", "smollm2-135m"
ASK = "What is the weather in Paris?"
FACT = "What is the capital of France? Reply as JSON."
FORM = 'What is the capital of France? Reply as JSON: {"capital": "...", "sure": true}'
"""
CLIENTS = {
    "openai": """
import openai
client = openai.OpenAI(base_url=URL, api_key="any")
about = {"model": MODEL, "temperature": 0}
reply = client.chat.completions.parse(messages=[{"role": "user", "content": FACT}], response_format=Fact, **about)
capital = reply.choices[0].message.parsed.capital
tools, messages = [openai.pydantic_function_tool(Weather)], [{"role": "user", "content": ASK}]
choice = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
message = client.chat.completions.parse(messages=messages, **choice, **about).choices[0].message
(call,) = message.tool_calls
with client.chat.completions.stream(messages=messages, **choice, **about) as stream:
    again = stream.get_final_completion().choices[0]
assert again.finish_reason == "tool_calls"
assert again.message.tool_calls[0].function.parsed_arguments == call.function.parsed_arguments
sent = {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": {
    "name": call.function.name, "arguments": call.function.arguments}}]}
messages += [sent, {"role": "tool", "tool_call_id": call.id, "content": "20 C and sunny"}]
answer = client.chat.completions.create(messages=messages, tools=tools, **about).choices[0].message.content
print(json.dumps([capital, call.function.parsed_arguments.model_dump(), answer]))
""",
    "anthropic": """
import anthropic
client = anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key="any")
about = {"model": MODEL, "max_tokens": 200, "extra_body": {"temperature": 0}}
capital = client.messages.parse(messages=[{"role": "user", "content": FACT}], output_format=Fact, **about)
tools = [{"name": "Weather", "description": Weather.__doc__, "input_schema": Weather.model_json_schema()}]
choice = {"tools": tools, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
messages = [{"role": "user", "content": ASK}]
first = client.messages.create(messages=messages, **choice, **about)
assert first.stop_reason == "tool_use"
(call,) = first.content
with client.messages.stream(messages=messages, **choice, **about) as stream:
    assert stream.get_final_message().content[0].input == call.input
assert client.messages.count_tokens(model=MODEL, messages=messages).input_tokens > 10
thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}, **about, "max_tokens": 1100}  # the model does not
with client.messages.stream(messages=messages, **thinking) as stream:
    assert "".join(stream.text_stream) == client.messages.create(messages=messages, **thinking).content[0].text
result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "20 C and sunny"}]}
messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
(text,) = client.messages.create(messages=messages, tools=tools, **about).content
print(json.dumps([capital.parsed_output.capital, call.input, text.text]))
""",
    "openai responses": """
import openai
client = openai.OpenAI(base_url=URL, api_key="any")
about = {"model": MODEL, "temperature": 0}
capital = client.responses.parse(input=FACT, text_format=Fact, **about).output_parsed.capital
tools = [openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}]
choice = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
first = client.responses.parse(input=ASK, **choice, **about)
(call,) = first.output
with client.responses.stream(input=ASK, **choice, **about) as stream:
    assert stream.get_final_response().output[0].arguments == call.arguments
given = [{"role": "user", "content": ASK}, *first.output]
given.append({"type": "function_call_output", "call_id": call.call_id, "output": "20 C and sunny"})
answer = client.responses.create(input=given, tools=tools, **about).output_text
print(json.dumps([capital, json.loads(call.arguments), answer]))
""",
    "langchain": """
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
model = ChatOpenAI(base_url=URL, api_key="any", model=MODEL, temperature=0)
capital = model.with_structured_output(Fact).invoke(FACT).capital
for method in ("function_calling", "json_mode"):
    assert isinstance(model.with_structured_output(Fact, method=method).invoke(FORM), Fact)
bound = model.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
reply = bound.invoke(ASK)
(call,) = reply.tool_calls
streamed = None
for chunk in bound.stream(ASK):
    streamed = chunk if streamed is None else streamed + chunk
assert streamed.tool_calls[0]["args"] == call["args"]
result = ToolMessage("20 C and sunny", tool_call_id=call["id"])
answer = model.bind_tools([Weather]).invoke([HumanMessage(ASK), reply, result]).content
print(json.dumps([capital, call["args"], answer]))
""",
    "litellm": """
import litellm, openai
about = {"model": "openai/" + MODEL, "api_base": URL, "api_key": "any", "temperature": 0}
reply = litellm.completion(messages=[{"role": "user", "content": FACT}], response_format=Fact, **about)
capital = json.loads(reply.choices[0].message.content)["capital"]
tools, messages = [openai.pydantic_function_tool(Weather)], [{"role": "user", "content": ASK}]
choice = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
message = litellm.completion(messages=messages, **choice, **about).choices[0].message
(call,) = message.tool_calls
chunks = [*litellm.completion(messages=messages, stream=True, **choice, **about)]
built = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
assert built[0].function.arguments == call.function.arguments
messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "20 C and sunny"}]
answer = litellm.completion(messages=messages, tools=tools, **about).choices[0].message.content
print(json.dumps([capital, json.loads(call.function.arguments), answer]))
""",
    "dspy": """
import dspy
from pydantic import Field

class Step(BaseModel):
    next_thought: str = Field(max_length=60)
    next_tool_name: Literal["weather"]
    next_tool_args: Weather

class Answer(BaseModel):
    reasoning: str = Field(max_length=60)
    answer: str = Field(max_length=60)

def lm(form):
    return dspy.LM("openai/" + MODEL, api_base=URL, api_key="any", temperature=0, cache=False, response_format=form)

asked = []

def weather(city: str, unit: str) -> str:
    "Return the weather in a city."
    asked.append({"city": city, "unit": unit})
    return "20 C and sunny"

dspy.configure(lm=lm(Fact), adapter=dspy.JSONAdapter())
fact = dspy.Predict("question: str -> capital: str, sure: bool")(question=FACT)
assert isinstance(fact.sure, bool)
agent = dspy.ReAct("question -> answer", tools=[weather], max_iters=1)
agent.react.lm, agent.extract.predict.lm = lm(Step), lm(Answer)
done = agent(question=ASK)
assert done.trajectory["observation_0"] == "20 C and sunny", done.trajectory
print(json.dumps([fact.capital, asked[0], done.answer + done.trajectory["observation_0"]]))
""",
    "pydantic-ai": """
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

template = 'Reply as JSON: {{"capital": "...", "sure": true}}'
settings = {"temperature": 0, "max_tokens": 100, "parallel_tool_calls": False}
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind(MODEL, provider=OpenAIProvider(base_url=URL, api_key="any"))
    for output in (ToolOutput(Fact), NativeOutput(Fact), PromptedOutput(Fact, template=template)):
        fact = Agent(model, output_type=output, model_settings=settings).run_sync(FACT.partition(" Reply")[0]).output
        assert isinstance(fact, Fact)
    asked = []
    first = lambda step: {**settings, "tool_choice": ["weather"] if step.run_step == 1 else "auto"}
    agent = Agent(model, model_settings=first)

    @agent.tool_plain
    def weather(city: str, unit: Literal["C", "F"]) -> str:
        "Return the weather in a city."
        asked.append({"city": city, "unit": unit})
        return "20 C and sunny"

    answer = agent.run_sync(ASK).output
    with agent.run_stream_sync(ASK) as stream:
        assert stream.get_output() == answer
    assert [call["city"] for call in asked] == ["Paris"] * 2, asked
print(json.dumps([fact.capital, asked[0], answer]))
""",
    "inspect": """
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import ToolFunction, tool

asked = []

@tool
def weather():
    async def execute(city: str, unit: Literal["C", "F"]) -> str:
        '''Return the weather in a city.

        Args:
            city: The city.
            unit: The unit.
        '''
        asked.append({"city": city, "unit": unit})
        return "20 C and sunny"
    return execute

model = get_model("openai-api/tot/" + MODEL, base_url=URL, api_key="any")
plan = [use_tools(weather(), tool_choice=ToolFunction("weather")), generate(tool_calls="loop")]
task = Task(dataset=[Sample(input=ASK)], solver=plan, message_limit=20)
(log,) = eval(task, model=model, temperature=0, display="none")
assert log.status == "success", log.error
messages = log.samples[0].messages
assert [one.role for one in messages] == ["user", "assistant", "tool", "assistant"], messages
print(json.dumps(["Paris", asked[0], messages[-1].text]))
""",
}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_gets_values_calls_and_an_answer(name: str, run: Callable[..., CompletedProcess[str]]) -> None:
    done = run("python", "-", code=START + CLIENTS[name])
    assert done.returncode == 0, done.stderr[-3000:]
    values: tuple[str, dict[str, Any], str] = json.loads(done.stdout.splitlines()[-1])
    capital, arguments, answer = values
    assert "Paris" in capital
    assert (arguments["city"], arguments["unit"] in "CF") == ("Paris", True)
    assert "20" in answer or "sunny" in answer
