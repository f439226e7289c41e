//! Makes jobs of a request: parameters, template, tokens, grammar.

use super::answers::AnswerHeader;
use super::api::Api;
use super::api_error::ApiError;
use super::app::App;
use super::requests::{Body, OfferedTools, Params, Prompts, ShownThoughts, parse, template_messages};
use super::served_models::ServedModel;
use super::stream::{ChannelSink, PartSplitter};
use crate::batching::{AnswerEvent, Job};
use crate::grammar::AnswerGrammar;
use crate::tool_calls::{CallForm, CallParser};
use anemoe_text::chat::ThoughtSplitter;
use serde_json::Value;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// Most prompts of a completion.
const MOST_PROMPTS: usize = 64;

/// A request that is ready to run.
pub struct PreparedRequest {
    /// The model that answers.
    pub model: Arc<ServedModel>,
    /// Fields that all documents of the answer share.
    pub header: AnswerHeader,
    /// Parameters.
    pub params: Params,
    /// A job for each choice.
    pub jobs: Vec<Job>,
    /// Splitter of each choice's text.
    pub splitters: Vec<PartSplitter>,
    /// Events of all choices, by their index.
    pub events: UnboundedReceiver<(usize, AnswerEvent)>,
}

/// Prepares a request; its answers have to end by `deadline`.
///
/// # Errors
/// The request is wrong, or asks for what the model or this server does not have.
pub fn prepare(app: &App, bytes: &[u8], api: Api, deadline: Instant) -> Result<PreparedRequest, ApiError> {
    let mut body = parse(api, bytes)?;
    let model = app.models.get(body.model.as_deref())?;
    let info = &model.model.chain().model;
    let (params, context) = (body.params(&model.defaults, info.vocab_size, api)?, info.max_context);
    let most = app.settings.max_tokens.unwrap_or(usize::MAX);
    if let Some(wanted) = params.max_new.filter(|n| *n > most) {
        let what = format!("{wanted} is more than {most}, the most that this server gives");
        return Err(ApiError::param("max_tokens", what));
    }
    let repeated = std::mem::take(&mut body.repeated);
    let tools = body.tools()?;
    let is_held = params.schema.is_some() || !tools.forced.is_empty();
    let prompts = match api {
        Api::Completion => completion_prompts(&model, &body)?,
        _ => vec![chat_prompt(&model, &body, &tools, is_held, deadline)?],
    };
    let (most, wanted) = (app.settings.most_answers, prompts.len() * params.choices);
    if wanted > most {
        let what = format!("{wanted} answers to all prompts together, where this server has {most} places");
        let field = if params.choices > 1 { "n" } else { "prompt" };
        return Err(ApiError::param(field, what));
    }
    for prompt in &prompts {
        check_length(prompt, context)?;
    }
    let grammar = grammar(&model, &params, &tools)?;
    let mut stops = params.stops.clone();
    let mut ends = params.ends.clone();
    let calls = model.call_form.as_ref().filter(|_| !tools.shown.is_empty());
    let mut marks = calls.map(|form| form.special_tokens(&model.tokenizer)).unwrap_or_default();
    if api != Api::Completion {
        stops.extend(model.template.stop_strings().into_iter().map(str::to_string));
        ends.extend(&model.ends);
        marks.extend(&model.marks);
    }
    let most = app.settings.max_tokens.unwrap_or(context);
    let mut header = AnswerHeader::new(api, &model.id, Arc::clone(&model.tokenizer));
    header.prompt = prompts.iter().map(|prompt| prompt.ids.len()).sum();
    header.repeated = repeated;
    header.stops.clone_from(&params.stops);
    if params.logprobs.is_some() {
        header.words = model.grammars.words(&model.model).ok();
    }
    let calls = calls.map(|form| {
        let parser = CallParser::new(form.clone(), tools.shown);
        let parser = if tools.is_single { parser.single() } else { parser };
        if tools.forced.is_empty() { parser } else { parser.forced() }
    });
    // Nothing behind a single call would be kept.
    let end_tag =
        model.call_form.as_ref().filter(|_| tools.is_single && calls.is_some()).and_then(CallForm::end_tag);
    stops.extend(end_tag.map(str::to_string));
    let (mut jobs, mut splitters) = (Vec::new(), Vec::new());
    let (sender, events) = unbounded_channel();
    for prompt in &prompts {
        let shows = app.settings.shows_thoughts;
        let splits = api != Api::Completion && !(shows && params.thoughts == ShownThoughts::Inside);
        let splitter = PartSplitter {
            thoughts: splits.then(|| ThoughtSplitter::new(&prompt.beginning)),
            shows_thoughts: shows && params.thoughts == ShownThoughts::Apart,
            calls: calls.clone(),
        };
        let max_new = params.max_new.or_else(|| model.defaults.max_new(prompt.ids.len())).unwrap_or(context);
        for choice in 0..params.choices {
            let mut sampling = params.sampling.clone();
            sampling.seed = sampling.seed.wrapping_add(choice as u64);
            splitters.push(splitter.clone());
            jobs.push(Job {
                id: header.id.clone(),
                prompt: prompt.ids.clone(),
                max_new: max_new.min(most),
                sampling,
                stops: stops.clone(),
                ends: ends.clone(),
                marks: marks.clone(),
                ignore_eos: params.ignore_eos,
                logprobs: params.logprobs,
                grammar: grammar.as_ref().map(AnswerGrammar::another),
                deadline: Some(deadline),
                sink: Box::new(ChannelSink { index: jobs.len(), sender: sender.clone() }),
            });
        }
    }
    Ok(PreparedRequest { model, header, params, jobs, splitters, events })
}

/// Counts the tokens of a request's prompt.
///
/// # Errors
/// The request is wrong.
pub fn count_tokens(app: &App, bytes: &[u8], api: Api, deadline: Instant) -> Result<usize, ApiError> {
    let body = parse(api, bytes)?;
    let model = app.models.get(body.model.as_deref())?;
    Ok(chat_prompt(&model, &body, &body.tools()?, false, deadline)?.ids.len())
}

fn check_length(prompt: &Prompt, context: usize) -> Result<(), ApiError> {
    match prompt.ids.len() {
        0 => Err(ApiError::param("messages", "the prompt is empty")),
        n if n > context => Err(too_long(&n.to_string(), context)),
        _ => Ok(()),
    }
}

/// Makes the error of a prompt that is too long, in the words that agents look for to shorten it.
fn too_long(tokens: &str, context: usize) -> ApiError {
    let what =
        format!("prompt is too long: {tokens} tokens > {context} maximum, the context length of this model");
    ApiError::param("messages", what).with_code("context_length_exceeded")
}

/// Refuses a text that is too long however it is cut into tokens, before much memory is spent on that.
fn check_text(model: &ServedModel, text: &str) -> Result<(), ApiError> {
    let (context, longest) = (model.model.chain().model.max_context, model.tokenizer.longest_token());
    match text.chars().count().div_ceil(longest) {
        n if n > context => Err(too_long(&format!("at least {n}"), context)),
        _ => Ok(()),
    }
}

/// Makes the grammar of an answer: a call of one of the forced tools, or a schema; `None` where neither is asked for.
fn grammar(
    model: &ServedModel,
    params: &Params,
    tools: &OfferedTools<'_>,
) -> Result<Option<AnswerGrammar>, ApiError> {
    let form = model.call_form.as_ref();
    if form.is_none() && !tools.forced.is_empty() {
        let what =
            "a call cannot be forced: the form in which this model's template writes calls is not known";
        return Err(ApiError::param("tool_choice", what));
    }
    let (callable, schema) = alternatives(params.schema.as_ref(), tools, form.is_some());
    if callable.is_empty() && schema.is_none() {
        return Ok(None);
    }
    let lark =
        |tools: &[(&str, Value)]| form.map(|form| form.grammar(tools, &model.tokenizer)).unwrap_or_default();
    let grammar = model.grammars.answer(&model.model, &callable, schema, lark);
    let field = if schema.is_some() { "response_format" } else { "tools" };
    grammar.map(Some).map_err(|e| ApiError::param(field, e))
}

/// Returns the tools and the schema of which an answer is a call or the JSON. A call that has to come has no format.
fn alternatives<'a>(
    schema: Option<&'a Value>,
    tools: &OfferedTools<'a>,
    has_form: bool,
) -> (Vec<&'a Value>, Option<&'a Value>) {
    match schema {
        Some(_) if tools.forced.is_empty() => (tools.shown.iter().filter(|_| has_form).collect(), schema),
        _ => (tools.forced.clone(), None),
    }
}

/// A prompt.
struct Prompt {
    /// End of the text that belongs to the answer.
    beginning: String,
    ids: Vec<u32>,
}

fn chat_prompt(
    model: &ServedModel,
    body: &Body,
    tools: &OfferedTools<'_>,
    is_held: bool,
    deadline: Instant,
) -> Result<Prompt, ApiError> {
    let messages = body.messages.as_ref().ok_or_else(|| ApiError::param("messages", "it is missing"))?;
    let template = &model.template;
    let mut messages = template_messages(messages, template.thought_key())?;
    let tools = Some(tools.shown).filter(|tools| !tools.is_empty());
    if tools.is_some() && !template.takes_tools() {
        return Err(ApiError::param("tools", "the chat template of this model has none"));
    }
    let wrong = |e: anemoe_runtime::Error| ApiError::param("messages", e.what());
    let variables = body.template_variables()?;
    let render = |messages: &[Value]| {
        template.render_until(messages, tools, !body.continues, &variables, Some(deadline)).map_err(wrong)
    };
    let mut text = render_changed(&mut messages, render)?;
    if let Some(last) = messages.last().filter(|_| body.continues) {
        let begun = last["content"].as_str().unwrap_or_default().trim();
        let at = text.rfind(begun).ok_or_else(|| {
            ApiError::param(
                "messages",
                "the chat template of this model changes the last one, which cannot go on",
            )
        })?;
        text.truncate(at + begun.len());
    }
    let mut beginning = match !body.continues && ThoughtSplitter::may_begin_in(&text) {
        true => template.beginning_of_answer(&text, &messages, tools, &variables).map_err(wrong)?,
        false => String::new(),
    };
    let splitter = ThoughtSplitter::new(&beginning);
    // A grammar has no thoughts in it. A call says itself where its text begins.
    if is_held && (splitter.is_thinking() || tools.is_none()) {
        text += splitter.way_to_text();
        beginning += splitter.way_to_text();
    }
    check_text(model, &text)?;
    let ids = model.tokenizer.encode_written(&text).map_err(wrong)?;
    Ok(Prompt { beginning, ids })
}

/// Renders messages, where the template refuses them changed in what it may ask for.
fn render_changed(
    messages: &mut Vec<Value>,
    render: impl Fn(&[Value]) -> Result<String, ApiError>,
) -> Result<String, ApiError> {
    let changes: [fn(&mut Vec<Value>) -> bool; 3] =
        [|messages| shorten_ids(messages), join_results, join_turns];
    let mut text = render(messages);
    if text.is_ok() {
        return text;
    }
    let given = messages.clone();
    for change in changes {
        if change(messages)
            && let Ok(text) = render(messages)
        {
            return Ok(text);
        }
        messages.clone_from(&given);
    }
    // What one change does not mend, all of them may.
    for change in changes {
        if text.is_err() && change(messages) {
            text = render(messages).or(text);
        }
    }
    text
}

/// Gives calls and results ids of nine letters and digits, which templates of Mistral ask for. Tells whether there are any.
fn shorten_ids(messages: &mut [Value]) -> bool {
    let (mut calls, mut results): (Vec<String>, usize) = (Vec::new(), 0);
    for message in messages {
        let own = message.get_mut("tool_calls").and_then(Value::as_array_mut);
        for call in own.into_iter().flatten() {
            let id = call["id"].as_str().map_or_else(|| calls.len().to_string(), str::to_string);
            calls.push(short_id(&id));
            call["id"] = short_id(&id).into();
        }
        if message["role"] == "tool" {
            let next = || calls.get(results).cloned().unwrap_or_default();
            message["tool_call_id"] = message["tool_call_id"].as_str().map_or_else(next, short_id).into();
            results += 1;
        }
    }
    !calls.is_empty()
}

/// Returns an id if it has nine letters and digits, or else such an id made of its hash.
fn short_id(id: &str) -> String {
    if id.len() == 9 && id.bytes().all(|b| b.is_ascii_alphanumeric()) {
        return id.into();
    }
    let mut hasher = std::hash::DefaultHasher::new();
    id.hash(&mut hasher);
    format!("{:09x}", hasher.finish() >> 28)
}

/// Joins questions to the results of tools before them, for templates in which only answers may follow results. Tells
/// whether there are any.
fn join_results(messages: &mut Vec<Value>) -> bool {
    let count = messages.len();
    messages.dedup_by(|next, last| {
        let joins = last["role"] == "tool" && next["role"] == "user";
        if let (true, Value::String(text), Value::String(more)) =
            (joins, &mut last["content"], &next["content"])
        {
            *text += &format!("\n\n{more}");
        }
        joins
    });
    messages.len() < count
}

/// Makes turns of texts, for templates whose roles alternate: system prompts behind the first one become the user's, and
/// texts of one role that follow each other are one. Tells whether there are any.
fn join_turns(messages: &mut Vec<Value>) -> bool {
    let count = messages.len();
    let begin = messages.iter().position(|message| message["role"] != "system").unwrap_or(count);
    let mut is_changed = false;
    for message in messages.iter_mut().skip(begin).filter(|message| message["role"] == "system") {
        message["role"] = "user".into();
        is_changed = true;
    }
    messages.dedup_by(|next, last| {
        // Thoughts, names and calls belong to one message.
        let is_text = |message: &Value| {
            let mut keys = message.as_object().into_iter().flat_map(|all| all.keys());
            message["role"] != "tool" && keys.all(|key| key == "role" || key == "content")
        };
        let joins = last["role"] == next["role"] && is_text(last) && is_text(next);
        if let (true, Value::String(text), Value::String(more)) =
            (joins, &mut last["content"], &next["content"])
        {
            *text += &format!("\n\n{more}");
        }
        joins
    });
    messages.len() < count || is_changed
}

fn completion_prompts(model: &ServedModel, body: &Body) -> Result<Vec<Prompt>, ApiError> {
    let info = &model.model.chain().model;
    let wrong = |e: anemoe_runtime::Error| ApiError::param("prompt", e.what());
    let encode = |text: &String| {
        check_text(model, text)?;
        model.tokenizer.encode(text, info.bos_token_id).map_err(wrong)
    };
    let all: Vec<Vec<u32>> =
        match body.prompt.as_ref().ok_or_else(|| ApiError::param("prompt", "it is missing"))? {
            Prompts::Text(text) => vec![encode(text)?],
            Prompts::Texts(texts) => texts.iter().map(encode).collect::<Result<_, _>>()?,
            Prompts::Ids(ids) => vec![ids.clone()],
            Prompts::AllIds(all) => all.clone(),
        };
    if all.is_empty() || all.len() > MOST_PROMPTS {
        let what = format!("{} prompts, where 1 to {MOST_PROMPTS} are meant", all.len());
        return Err(ApiError::param("prompt", what));
    }
    if let Some(id) = all.iter().flatten().find(|id| **id as usize >= info.vocab_size) {
        let what = format!("token {id} is outside the vocabulary of {} tokens", info.vocab_size);
        return Err(ApiError::param("prompt", what));
    }
    Ok(all.into_iter().map(|ids| Prompt { beginning: String::new(), ids }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_call_that_has_to_come_has_no_format() {
        let (schema, shown) = (json!({"type": "object"}), [json!("f"), json!("g")]);
        let of = |forced: Vec<&'static str>, schema, has_form| {
            let forced = shown.iter().filter(|tool| forced.iter().any(|name| *tool == name)).collect();
            let tools = OfferedTools { shown: &shown, forced, is_single: false };
            let (callable, schema) = alternatives(schema, &tools, has_form);
            (callable.len(), schema.is_some())
        };
        assert_eq!(of(vec!["g"], Some(&schema), true), (1, false));
        assert_eq!(of(vec!["g"], None, true), (1, false));
        assert_eq!(of(vec![], Some(&schema), true), (2, true));
        assert_eq!(of(vec![], Some(&schema), false), (0, true));
        assert_eq!(of(vec![], None, true), (0, false));
    }

    #[test]
    fn messages_are_changed_in_what_a_template_refuses() {
        let call = |id: Value| json!({"id": id, "function": {"name": "f", "arguments": {}}});
        let asks = |messages: &[Value]| {
            let calls = messages.iter().flat_map(|m| m["tool_calls"].as_array().into_iter().flatten());
            let calls: Vec<&Value> = calls.map(|call| &call["id"]).collect();
            let results: Vec<&Value> =
                messages.iter().filter(|m| m["role"] == "tool").map(|m| &m["tool_call_id"]).collect();
            let is_short = |id: &&Value| id.as_str().is_some_and(|id| id.len() == 9);
            let fits = calls == results && calls.iter().all(is_short);
            fits.then(|| json!(calls).to_string()).ok_or(ApiError::invalid("ids have nine characters"))
        };
        for (first, second) in [
            (json!("call_0_6615e998e65de_0"), json!("call_0_6615e998e65de_1")),
            (json!(null), json!(null)),
            (json!("abcdefgh1"), json!("call_1")),
        ] {
            let result = |id: &Value| json!({"role": "tool", "content": "", "tool_call_id": id});
            let calls = json!([call(first.clone()), call(second.clone())]);
            let mut messages = vec![
                json!({"role": "user", "content": "q"}),
                json!({"role": "assistant", "tool_calls": calls}),
                result(&first),
                result(&second),
            ];
            let ids: Vec<String> =
                serde_json::from_str(&render_changed(&mut messages, asks).unwrap()).unwrap();
            assert!(ids[0] != ids[1] && (first != "abcdefgh1" || ids[0] == "abcdefgh1"), "{ids:?}");
        }
        // System prompts in two parts, and behind a question.
        let message = |role: &str, text: &str| json!({"role": role, "content": text});
        let turns = [("system", "a"), ("system", "b"), ("user", "c"), ("system", "d"), ("assistant", "e")];
        let mut turns = turns.map(|(role, text)| message(role, text)).to_vec();
        let alternate = |messages: &[Value]| match messages.windows(2).any(|m| m[0]["role"] == m[1]["role"]) {
            true => Err(ApiError::invalid("roles must alternate")),
            false => Ok(String::new()),
        };
        render_changed(&mut turns, alternate).unwrap();
        let joined = [("system", "a\n\nb"), ("user", "c\n\nd"), ("assistant", "e")];
        assert_eq!(turns, joined.map(|(role, text)| message(role, text)));
        // One change that suffices is the only one, and thoughts stay in their message.
        let calls = json!({"role": "assistant", "tool_calls": [call("call_1".into())]});
        let mut turns = vec![message("user", "a"), message("user", "b"), calls.clone()];
        render_changed(&mut turns, alternate).unwrap();
        assert_eq!(turns, [message("user", "a\n\nb"), calls]);
        let thought = json!({"role": "assistant", "content": "x", "reasoning_content": "y"});
        assert!(render_changed(&mut vec![thought.clone(), thought], alternate).is_err());
        let mut none = vec![json!({"role": "user", "content": "q"})];
        let error = render_changed(&mut none, |_| Err(ApiError::invalid("x"))).unwrap_err();
        assert_eq!((error.message.as_str(), none), ("x", vec![json!({"role": "user", "content": "q"})]));
    }
}
