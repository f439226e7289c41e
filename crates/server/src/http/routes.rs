//! Routes: the handler of each path.

use super::answers::writer;
use super::api::Api;
use super::api_error::ApiError;
use super::app::App;
use super::body::read_body;
use super::keep_alive::{KeptAlive, LONGEST_SILENCE};
use super::prepare::{PreparedRequest, count_tokens, prepare};
use super::served_models::BUSY;
use super::stream::ComingAnswers;
use crate::batching::Refusal;
use axum::Json;
use axum::body::Body as HttpBody;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use jiff::Timestamp;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Size of a body from which on few requests are prepared at the same time, in bytes.
const LARGE_BODY: usize = 256 << 10;
/// Time after which a request looks again whether its model may be opened.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// The chat page: one file without external scripts or styles.
const PAGE: &str = include_str!("page.html");
const PAGE_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; \
                           base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Counts the tokens of a prompt of `/v1/messages`.
pub async fn message_tokens(State(app): State<Arc<App>>, request: Request) -> Response {
    let api = Api::Messages;
    let deadline = Instant::now() + app.settings.request_timeout;
    let count = move |app: &App, bytes: &[u8]| count_tokens(app, bytes, api, deadline);
    match prepared(&app, request, deadline, count).await {
        Ok(n) => Json(json!({"input_tokens": n})).into_response(),
        Err(e) => e.named_for(api).response(api),
    }
}

/// Answers a request of an API.
pub async fn answer(app: Arc<App>, request: Request, api: Api) -> Response {
    let answered = try_answer(app, request, api).await;
    answered.unwrap_or_else(|e| e.named_for(api).response(api))
}

async fn try_answer(app: Arc<App>, request: Request, api: Api) -> Result<Response, ApiError> {
    let deadline = Instant::now() + app.settings.request_timeout;
    let work = move |app: &App, bytes: &[u8]| prepare(app, bytes, api, deadline);
    let PreparedRequest { model, header, params, jobs, splitters, events } =
        prepared(&app, request, deadline, work).await?;
    model.batcher.submit(jobs).map_err(|refusal| match refusal {
        Refusal::QueueFull => {
            let what = "too many requests wait; try again later";
            ApiError::new(StatusCode::TOO_MANY_REQUESTS, what).with_code("queue_full")
        }
        Refusal::Closed => ApiError::closing(),
    })?;
    let coming = ComingAnswers::new(writer(header), events, splitters, params.choices);
    if !params.stream {
        return Ok(Json(coming.collect().await?).into_response());
    }
    let events = KeptAlive::new(coming.stream(params.include_usage), LONGEST_SILENCE);
    let mut response = HttpBody::from_stream(events).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    Ok(response)
}

/// Reads a body and does the `work` that it asks for on a thread of its own: templates, tokenizers and grammars take time,
/// which must not block connections.
async fn prepared<T: Send + 'static>(
    app: &Arc<App>,
    request: Request,
    deadline: Instant,
    work: impl Fn(&App, &[u8]) -> Result<T, ApiError> + Send + Sync + 'static,
) -> Result<T, ApiError> {
    let bytes = read_body(request, app.settings.max_body, app.settings.body_timeout).await?;
    let (bytes, work) = (Arc::new(bytes), Arc::new(work));
    let prepare = async {
        let _place = if bytes.len() > LARGE_BODY { app.large.acquire().await.ok() } else { None };
        loop {
            let (shared, bytes, work) = (Arc::clone(app), Arc::clone(&bytes), Arc::clone(&work));
            let done = tokio::task::spawn_blocking(move || work(&shared, &bytes)).await;
            match done {
                // No thread waits for a model to be closed.
                Ok(Err(e)) if e.code == Some(BUSY) => tokio::time::sleep(LOOK_AGAIN).await,
                done => return done,
            }
        }
    };
    match tokio::time::timeout_at(deadline.into(), prepare).await {
        Ok(done) => done.unwrap_or_else(|_| {
            Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the request could not be prepared"))
        }),
        Err(_) => Err(ApiError::timeout("the request")),
    }
}

/// Returns the description of a model, with the fields of both OpenAI's and Anthropic's API.
fn model_json(app: &App, id: &str) -> Value {
    let mut value = json!({"id": id, "object": "model", "created": app.created, "owned_by": "anemoe", "type": "model",
        "display_name": id, "created_at": date_time(app.created)});
    if let Some(model) = app.models.open_models().iter().find(|model| model.id == id) {
        value["max_model_len"] = model.model.chain().model.max_context.into();
    }
    value
}

pub async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    let all: Vec<Value> = app.models.ids().map(|id| model_json(&app, id)).collect();
    let ends = [all.first(), all.last()].map(|model| model.map(|model| model["id"].clone()));
    Json(json!({"object": "list", "data": all, "has_more": false, "first_id": ends[0], "last_id": ends[1]}))
}

/// Returns a time, in seconds since 1970, as RFC 3339 writes it.
fn date_time(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|seconds| Timestamp::from_second(seconds).ok());
    time.unwrap_or_default().to_string()
}

/// Returns the API in whose form a path without one of its own answers a fault.
fn api_of(path: &str, headers: &HeaderMap) -> Api {
    let is_anthropic = path == "/v1/messages" || path.starts_with("/v1/messages/");
    if is_anthropic || headers.contains_key("anthropic-version") { Api::Messages } else { Api::Chat }
}

pub async fn model(
    State(app): State<Arc<App>>,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Json<Value>, Response> {
    let id = uri.path().strip_prefix("/v1/models/").unwrap_or_default();
    // Bytes that are no text become replacement characters.
    let id = percent_encoding::percent_decode_str(id).decode_utf8_lossy();
    if !app.models.ids().any(|known| known == id) {
        let what = format!("there is no model `{}`", id.escape_debug());
        let error = ApiError::new(StatusCode::NOT_FOUND, what).with_code("model_not_found");
        return Err(error.response(api_of(uri.path(), &headers)));
    }
    Ok(Json(model_json(&app, &id)))
}

/// Removes repeated slashes, and one at the end, which clients write by mistake.
pub fn tidy_path(uri: &mut Uri) {
    let path = uri.path();
    if path.len() < 2 || !(path.ends_with('/') || path.contains("//")) {
        return;
    }
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    if let Ok(tidy) = format!("/{}{query}", parts.join("/")).parse() {
        *uri = tidy;
    }
}

pub async fn embeddings() -> ApiError {
    ApiError::invalid("this server makes no embeddings: a bundle has a language model alone")
        .with_code("unsupported")
}

pub async fn health(State(app): State<Arc<App>>) -> Response {
    let open = app.models.open_models();
    let is_closing = app.models.is_closing();
    let status = if is_closing { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    let word = if is_closing { "closing" } else { "ok" };
    let jobs = app.models.jobs();
    let ids: Vec<&str> = app.models.ids().collect();
    (status, Json(json!({"status": word, "model": ids[0], "models": ids, "open": open.len(), "jobs": jobs})))
        .into_response()
}

pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], app.models.metrics.render()).into_response()
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

pub async fn nothing_here(uri: Uri, headers: HeaderMap) -> Response {
    let path = uri.path();
    let what = match meant_path(path) {
        None => "there is nothing at this path; this is OpenAI's API: /v1/chat/completions, /v1/completions, /v1/responses, \
                 /v1/models, and Anthropic's: /v1/messages"
            .to_string(),
        Some(meant) => format!("there is nothing at {}; {meant} is", path.escape_debug()),
    };
    ApiError::new(StatusCode::NOT_FOUND, what).response(api_of(path, &headers))
}

pub async fn wrong_method(uri: Uri, headers: HeaderMap) -> Response {
    let error = ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "this path takes another method");
    error.response(api_of(uri.path(), &headers))
}

const PATHS: &str = "/ /health /metrics /v1 /v1/chat/completions /v1/completions /v1/embeddings /v1/messages \
                     /v1/messages/count_tokens /v1/models /v1/responses";

/// Returns the path of the API in which another one ends: base URLs of clients often lack `/v1`, or have it twice.
fn meant_path(path: &str) -> Option<&'static str> {
    PATHS.split(' ').filter(|p| p.starts_with("/v1/")).find(|p| format!("/v1{path}").ends_with(p))
}

/// Returns the path's name in metrics: one of few names for any path.
fn known_path(path: &str) -> &'static str {
    if path.starts_with("/v1/models/") {
        return "/v1/models/{id}";
    }
    PATHS.split(' ').find(|p| *p == path).unwrap_or("other")
}

/// Checks the name of the server and the API key, adds CORS headers, counts and logs the request.
pub async fn authorize_and_log(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let path = known_path(request.uri().path());
    let api = api_of(request.uri().path(), request.headers());
    let method = request.method().clone();
    let cors = app.origins.headers(request.headers());
    let is_open = matches!(path, "/" | "/health");
    let mut response = if app.keys.is_empty() && !app.hosts.accept(request.uri().host(), request.headers()) {
        let what = "this server is not known by the name in the header host; --allow-host NAME adds it";
        ApiError::new(StatusCode::FORBIDDEN, what).with_code("host").response(api)
    } else if method == axum::http::Method::OPTIONS && !cors.is_empty() {
        StatusCode::NO_CONTENT.into_response()
    } else if !is_open && !app.keys.accept(request.headers()) {
        let what = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`";
        ApiError::new(StatusCode::UNAUTHORIZED, what).with_code("invalid_api_key").response(api)
    } else {
        next.run(request).await
    };
    let headers: &mut HeaderMap = response.headers_mut();
    for (name, value) in cors {
        headers.insert(name, value);
    }
    let status = response.status().as_u16();
    app.models.metrics.count_request(path, status);
    let ms = started.elapsed().as_millis() as u64;
    tracing::info!(%method, path, status, ms, "request");
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batching::BatchLimits;
    use crate::http::access::{ApiKeys, Hosts, Origins};
    use crate::http::{Models, OpenBundle, ServerSettings};
    use tokio::sync::Semaphore;

    #[test]
    fn paths_of_wrong_base_urls_are_told() {
        for (path, meant) in [
            ("/chat/completions", Some("/v1/chat/completions")),
            ("/v1/v1/messages", Some("/v1/messages")),
            ("/openai/v1/models", Some("/v1/models")),
            ("/completions", Some("/v1/completions")),
            ("/api/tags", None),
            ("/", None),
        ] {
            assert_eq!(meant_path(path), meant);
        }
    }

    fn app() -> Arc<App> {
        let second = Duration::from_secs(1);
        let settings = ServerSettings {
            keys: Vec::new(),
            hosts: Vec::new(),
            origins: Vec::new(),
            shows_thoughts: true,
            most_answers: 1,
            max_tokens: None,
            max_body: 1,
            max_connections: 1,
            request_timeout: second,
            body_timeout: second,
            grace: second,
        };
        let limits = BatchLimits { sequences: 1, queue: 1, prefixes: 0, stall: second };
        let open = || -> OpenBundle { Box::new(|| unreachable!("no test opens a bundle")) };
        let bundles = vec![("a".to_string(), open()), ("b".to_string(), open())];
        Arc::new(App {
            keys: ApiKeys::new(&[]),
            hosts: Hosts::new(&[]),
            origins: Origins::new(Vec::new()),
            created: 1_709_210_096,
            large: Semaphore::new(1),
            settings,
            models: Models::new(bundles, 1, None, limits),
        })
    }

    fn run<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
    }

    #[test]
    fn models_have_the_fields_of_both_apis() {
        let Json(all) = run(models(State(app())));
        assert_eq!(
            (&all["has_more"], &all["first_id"], &all["last_id"]),
            (&json!(false), &json!("a"), &json!("b"))
        );
        let Json(one) = run(model(State(app()), Uri::from_static("/v1/models/b"), HeaderMap::new())).unwrap();
        let anthropic = [&one["type"], &one["display_name"], &one["created_at"]];
        assert_eq!(anthropic, ["model", "b", "2024-02-29T12:34:56Z"]);
        assert_eq!((&one, &one["object"]), (&all["data"][1], &json!("model")));
        for (seconds, date) in [(0, "1970-01-01"), (951_868_800, "2000-03-01"), (1_735_689_599, "2024-12-31")]
        {
            assert!(date_time(seconds).starts_with(date), "{}", date_time(seconds));
        }
    }

    #[test]
    fn faults_of_paths_have_the_form_of_their_api() {
        let versioned =
            || HeaderMap::from_iter([("anthropic-version".parse().unwrap(), "2023-06-01".parse().unwrap())]);
        let missing =
            |headers| run(model(State(app()), Uri::from_static("/v1/models/nope"), headers)).unwrap_err();
        let nothing = |path| run(nothing_here(Uri::from_static(path), HeaderMap::new()));
        let wrong = |path| run(wrong_method(Uri::from_static(path), HeaderMap::new()));
        for (response, status, is_anthropic) in [
            (missing(versioned()), 404, true),
            (missing(HeaderMap::new()), 404, false),
            (nothing("/v1/messages/batches"), 404, true),
            (nothing("/v1/messagesx"), 404, false),
            (wrong("/v1/messages"), 405, true),
            (wrong("/v1/responses"), 405, false),
        ] {
            assert_eq!(response.status(), status);
            let bytes = run(axum::body::to_bytes(response.into_body(), 1 << 20)).unwrap();
            let error: Value = serde_json::from_slice(&bytes).unwrap();
            assert_eq!(
                (error["type"] == "error", error["error"]["message"].is_string()),
                (is_anthropic, true)
            );
        }
    }

    #[test]
    fn slashes_too_many_are_removed() {
        for (path, tidy) in [
            ("/v1/models/", "/v1/models"),
            ("//v1//models?a=b/", "/v1/models?a=b/"),
            ("/", "/"),
            ("/v1", "/v1"),
        ] {
            let mut uri: Uri = path.parse().unwrap();
            tidy_path(&mut uri);
            assert_eq!(uri.to_string(), tidy);
        }
    }
}
