//! Routes: the handler of each path.

use super::answer::{AnswerHeader, Endpoint};
use super::api_error::ApiError;
use super::app::{App, Unconnected};
use super::params::{Body, OfferedTools, Params, Prompts, template_messages};
use super::stream::{ChannelSink, EventStream, collect};
use crate::batching::{Job, Refusal};
use crate::grammar::AnswerGrammar;
use crate::tool_calls::CallParser;
use axum::Json;
use axum::body::Body as HttpBody;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc::unbounded_channel;

/// Most prompts of a completion.
const MOST_PROMPTS: usize = 64;
/// The chat page: one file without external scripts or styles.
const PAGE: &str = include_str!("page.html");
const PAGE_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; \
                           base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// A request whose body is parsed and checked.
struct PreparedRequest {
    header: AnswerHeader,
    params: Params,
    prompts: Vec<Vec<u32>>,
    jobs: Vec<Job>,
    /// Parser of tool calls, if the request has tools.
    calls: Option<CallParser>,
}

pub async fn chat(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    answer(app, request, Endpoint::Chat).await
}

pub async fn completions(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    answer(app, request, Endpoint::Completion).await
}

async fn answer(app: Arc<App>, request: Request, endpoint: Endpoint) -> Result<Response, ApiError> {
    let bytes = read_body(&app, request).await?;
    let (sender, events) = unbounded_channel();
    let shared = Arc::clone(&app);
    // Templates, tokenizers and grammars take time, which must not block connections.
    let prepared = tokio::task::spawn_blocking(move || {
        let prepared = prepare(&app, &bytes, endpoint)?;
        Ok::<_, ApiError>(prepared)
    });
    let lost = |_| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the request could not be prepared");
    let PreparedRequest { header, params, prompts, mut jobs, calls } = prepared.await.map_err(lost)??;
    for (index, job) in jobs.iter_mut().enumerate() {
        job.sink = Box::new(ChannelSink { index, sender: sender.clone() });
    }
    drop(sender);
    let n = prompts.len() * params.choices;
    shared.batcher.submit(jobs).map_err(|refusal| match refusal {
        Refusal::QueueFull => {
            ApiError::new(StatusCode::TOO_MANY_REQUESTS, "too many requests wait; try again later")
                .with_code("queue_full")
        }
        Refusal::Closed => {
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the server is closing").with_code("closing")
        }
    })?;
    if !params.stream {
        return Ok(Json(collect(&header, events, n, params.choices, calls).await?).into_response());
    }
    let stream = EventStream::new(header, events, n, params.choices, params.include_usage, calls);
    let mut response = HttpBody::from_stream(stream).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    Ok(response)
}

/// Reads a body within the limits of size and time.
async fn read_body(app: &App, request: Request) -> Result<Vec<u8>, ApiError> {
    let too_large = || {
        let what = format!("the body has more than {} bytes", app.settings.max_body);
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, what).with_code("body_too_large")
    };
    // A page of another origin can send any content type but this one without a preflight.
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    let length =
        request.headers().get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|n| n > app.settings.max_body as u64) {
        return Err(too_large());
    }
    if !kind.eq_ignore_ascii_case("application/json") {
        let what = "the header content-type is not application/json; curl sends it with -H 'content-type: application/json'";
        return Err(ApiError::invalid(what));
    }
    let body = axum::body::to_bytes(request.into_body(), app.settings.max_body);
    match tokio::time::timeout(app.settings.body_timeout, body).await {
        Ok(Ok(bytes)) => Ok(bytes.into()),
        Ok(Err(e)) if format!("{e:?}").contains("LengthLimit") => Err(too_large()),
        Ok(Err(_)) => Err(ApiError::invalid("the body ends early")),
        Err(_) => Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body took too long")),
    }
}

fn prepare(app: &App, bytes: &[u8], endpoint: Endpoint) -> Result<PreparedRequest, ApiError> {
    let body = Body::parse(bytes)?;
    if let Some(model) = body.model.as_deref().filter(|m| *m != app.settings.model_id) {
        let what = format!(
            "there is no model `{}`; this server has `{}`",
            model.escape_debug(),
            app.settings.model_id
        );
        return Err(ApiError { param: Some("model".into()), ..ApiError::new(StatusCode::NOT_FOUND, what) }
            .with_code("model_not_found"));
    }
    let params = body.params(&app.settings.defaults, endpoint == Endpoint::Chat)?;
    let context = app.model.chain().model.max_context;
    if let (Some(most), Some(wanted)) = (app.settings.max_tokens, params.max_new)
        && wanted > most
    {
        return Err(ApiError::param(
            "max_tokens",
            format!("{wanted} is more than {most}, the most that this server gives"),
        ));
    }
    if endpoint == Endpoint::Completion && body.tools.is_some() {
        return Err(ApiError::param("tools", "a completion has none"));
    }
    let tools = body.tools()?;
    let prompts = match endpoint {
        Endpoint::Chat => vec![chat_prompt(app, &body, &tools)?],
        Endpoint::Completion => completion_prompts(app, &body)?,
    };
    let (limits, wanted) = (&app.settings.batch_limits, prompts.len() * params.choices);
    if wanted > limits.sequences + limits.queue {
        let most = limits.sequences + limits.queue;
        let what = format!("{wanted} answers to all prompts together, where this server has {most} places");
        return Err(ApiError::param("n", what));
    }
    for prompt in &prompts {
        if prompt.is_empty() {
            return Err(ApiError::param(endpoint.prompt_key(), "the prompt is empty"));
        }
        if prompt.len() > context {
            let what = format!(
                "the prompt has {} tokens, and the context of this model holds {context}",
                prompt.len()
            );
            return Err(ApiError::param(endpoint.prompt_key(), what).with_code("context_length_exceeded"));
        }
    }
    let grammar = grammar(app, &params, &tools)?;
    let mut stops = params.stops.clone();
    let mut ends = Vec::new();
    if endpoint == Endpoint::Chat {
        stops.extend(app.template.stop_strings().iter().map(|s| s.to_string()));
        ends.clone_from(&app.ends);
    }
    let max_new = params.max_new.unwrap_or(context).min(app.settings.max_tokens.unwrap_or(context));
    let mut header = AnswerHeader::new(endpoint, &app.settings.model_id, Arc::clone(&app.tokenizer));
    if params.logprobs.is_some() {
        header.words = app.grammars.words(&app.model).ok();
    }
    let calls = app.call_form.as_ref().filter(|_| !tools.shown.is_empty());
    let marks = calls.map(|form| form.special_tokens(&app.tokenizer)).unwrap_or_default();
    let mut jobs = Vec::new();
    for prompt in &prompts {
        for choice in 0..params.choices {
            let mut sampling = params.sampling.clone();
            sampling.seed = sampling.seed.wrapping_add(choice as u64);
            jobs.push(Job {
                id: header.id.clone(),
                prompt: prompt.clone(),
                max_new,
                sampling,
                stops: stops.clone(),
                ends: ends.clone(),
                marks: marks.clone(),
                ignore_eos: params.ignore_eos,
                logprobs: params.logprobs,
                grammar: grammar.as_ref().map(AnswerGrammar::another),
                deadline: Some(Instant::now() + app.settings.request_timeout),
                sink: Box::new(Unconnected),
            });
        }
    }
    let calls = calls.map(|form| CallParser::new(form.clone(), tools.shown));
    Ok(PreparedRequest { header, params, prompts, jobs, calls })
}

/// Makes the grammar of an answer: a call of one of the forced tools, or a schema; `None` where neither is asked for.
fn grammar(app: &App, params: &Params, tools: &OfferedTools) -> Result<Option<AnswerGrammar>, ApiError> {
    if tools.forced.is_empty() {
        let grammar = params.schema.clone().map(|schema| app.grammars.json(&app.model, schema)).transpose();
        return grammar.map_err(|e| ApiError::param("response_format", e));
    }
    if params.schema.is_some() {
        return Err(ApiError::param("response_format", "an answer that has to be a call has no format"));
    }
    let form = app.call_form.as_ref().ok_or_else(|| {
        let what =
            "a call cannot be forced: the form in which this model's template writes calls is not known";
        ApiError::param("tool_choice", what)
    })?;
    let parameters = tools.forced.iter().map(|tool| &tool["function"]["parameters"]);
    let lark = || form.grammar(&tools.forced, &app.tokenizer);
    let grammar = app.grammars.calls(&app.model, parameters, lark);
    grammar.map(Some).map_err(|e| ApiError::param("tools", e))
}

fn chat_prompt(app: &App, body: &Body, tools: &OfferedTools) -> Result<Vec<u32>, ApiError> {
    let messages = body.messages.as_ref().ok_or_else(|| ApiError::param("messages", "it is missing"))?;
    let messages = template_messages(messages)?;
    let tools = Some(tools.shown).filter(|tools| !tools.is_empty());
    if tools.is_some() && !app.template.takes_tools() {
        return Err(ApiError::param("tools", "the chat template of this model has none"));
    }
    let wrong = |e: anemoe_runtime::Error| ApiError::param("messages", e.what());
    let variables = body.template_variables()?;
    let text = app.template.render_with(&messages, tools, true, &variables).map_err(wrong)?;
    app.tokenizer.encode_written(&text).map_err(wrong)
}

fn completion_prompts(app: &App, body: &Body) -> Result<Vec<Vec<u32>>, ApiError> {
    let info = &app.model.chain().model;
    let wrong = |e: anemoe_runtime::Error| ApiError::param("prompt", e.what());
    let encode = |text: &String| app.tokenizer.encode(text, info.bos_token_id).map_err(wrong);
    let all: Vec<Vec<u32>> =
        match body.prompt.as_ref().ok_or_else(|| ApiError::param("prompt", "it is missing"))? {
            Prompts::Text(text) => vec![encode(text)?],
            Prompts::Texts(texts) => texts.iter().map(encode).collect::<Result<_, _>>()?,
            Prompts::Ids(ids) => vec![ids.clone()],
            Prompts::AllIds(all) => all.clone(),
        };
    if all.is_empty() || all.len() > MOST_PROMPTS {
        return Err(ApiError::param(
            "prompt",
            format!("{} prompts, where 1 to {MOST_PROMPTS} are meant", all.len()),
        ));
    }
    if let Some(id) = all.iter().flatten().find(|id| **id as usize >= info.vocab_size) {
        return Err(ApiError::param(
            "prompt",
            format!("token {id} is outside the vocabulary of {} tokens", info.vocab_size),
        ));
    }
    Ok(all)
}

fn model_json(app: &App) -> Value {
    let context = app.model.chain().model.max_context;
    json!({"id": app.settings.model_id, "object": "model", "created": app.created, "owned_by": "anemoe", "max_model_len": context})
}

pub async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [model_json(&app)]}))
}

pub async fn model(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    if id != app.settings.model_id {
        let what = format!("there is no model `{}`", id.escape_debug());
        return Err(ApiError::new(StatusCode::NOT_FOUND, what).with_code("model_not_found"));
    }
    Ok(Json(model_json(&app)))
}

pub async fn embeddings() -> ApiError {
    ApiError::invalid("this server makes no embeddings: a bundle has a language model alone")
        .with_code("unsupported")
}

pub async fn health(State(app): State<Arc<App>>) -> Response {
    let status = if app.batcher.is_closing() { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    let word = if app.batcher.is_closing() { "closing" } else { "ok" };
    (status, Json(json!({"status": word, "model": app.settings.model_id, "jobs": app.batcher.jobs()})))
        .into_response()
}

pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], app.metrics.render()).into_response()
}

pub async fn page() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, PAGE_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (headers, PAGE).into_response()
}

pub async fn nothing_here(uri: Uri) -> ApiError {
    let path = uri.path();
    let what = match known_path(&format!("/v1{path}")) {
        "other" => "there is nothing at this path; this is OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models"
            .to_string(),
        meant => format!("there is nothing at {}; {meant} is", path.escape_debug()),
    };
    ApiError::new(StatusCode::NOT_FOUND, what)
}

pub async fn wrong_method() -> ApiError {
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "this path takes another method")
}

/// Returns the path's name in metrics: one of few names for any path.
fn known_path(path: &str) -> &'static str {
    const PATHS: [&str; 8] = [
        "/",
        "/health",
        "/metrics",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/models",
        "/v1",
    ];
    if path.starts_with("/v1/models/") {
        return "/v1/models/{id}";
    }
    PATHS.into_iter().find(|p| *p == path).unwrap_or("other")
}

/// Checks the API key, adds CORS headers, counts and logs the request.
pub async fn authorize_and_log(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let path = known_path(request.uri().path());
    let method = request.method().clone();
    let cors = app.origins.headers(request.headers());
    let is_open = matches!(path, "/" | "/health");
    let mut response = if method == axum::http::Method::OPTIONS && !cors.is_empty() {
        StatusCode::NO_CONTENT.into_response()
    } else if !is_open && !app.keys.accept(request.headers()) {
        let what = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`";
        ApiError::new(StatusCode::UNAUTHORIZED, what).with_code("invalid_api_key").into_response()
    } else {
        next.run(request).await
    };
    let headers: &mut HeaderMap = response.headers_mut();
    for (name, value) in cors {
        headers.insert(name, value);
    }
    let status = response.status().as_u16();
    app.metrics.count_request(path, status);
    let ms = started.elapsed().as_millis() as u64;
    tracing::info!(%method, path, status, ms, "request");
    response
}
