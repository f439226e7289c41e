//! HTTP side of the server: connections, limits, and the paths of OpenAI's and Anthropic's APIs.

mod access;
mod answers;
mod api;
mod api_error;
mod app;
mod body;
mod keep_alive;
mod prepare;
mod requests;
mod routes;
mod served_models;
mod stream;

pub use access::parse_origin;
pub use app::ServerSettings;
pub use served_models::{Models, OpenBundle, OpenedBundle};

use crate::{Error, Result};
use access::{ApiKeys, Hosts, Origins};
use api::Api;
use app::App;
use axum::Router;
use axum::extract::{Request, State};
use axum::routing::{get, post};
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::net::TcpListener;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio_io_timeout::TimeoutWriter;

/// Threads that read requests, render templates, tokenize texts and compile grammars. Each of these has a budget of time;
/// many threads let a quick request pass slow ones.
const PREPARING_THREADS: usize = 16;
/// Bytes of stack of these threads: grammars of schemas are nested.
const PREPARING_STACK: usize = 64 << 20;
/// Time that an unused thread is kept: the first one for ever, since a system without room for another refuses it later.
const PREPARING_KEPT: Duration = Duration::from_secs(1 << 32);
/// Requests with large bodies that are prepared at the same time.
const LARGE_AT_ONCE: usize = 2;
/// Time that streams get to send their last bytes.
const CLOSING_TIME: Duration = Duration::from_secs(2);
/// Answer to a connection beyond the limit.
const TOO_MANY: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n\
connection: close\r\ncontent-length: 118\r\n\r\n{\"error\": {\"message\": \"too many connections; try again later\", \
\"type\": \"server_error\", \"param\": null, \"code\": \"busy\"}}";

/// Switch that ends a server, from any thread.
#[derive(Default)]
pub struct ShutdownSwitch(Notify);

impl ShutdownSwitch {
    /// Ends the server. The second call makes running answers fail.
    pub fn stop(&self) {
        self.0.notify_one();
    }
}

/// Serves models at `listeners` until `stop`. Running answers then get [`ServerSettings::grace`] to end, unless `stop`
/// comes a second time.
///
/// # Errors
/// The system cannot start threads, or a listener fails.
pub fn serve(
    settings: ServerSettings,
    models: Models,
    listeners: Vec<TcpListener>,
    stop: &ShutdownSwitch,
) -> Result<()> {
    let failed = |e| Error::io(Path::new("server"), e);
    let app = Arc::new(App {
        keys: ApiKeys::new(&settings.keys),
        hosts: Hosts::new(&settings.hosts),
        origins: Origins::new(settings.origins.clone()),
        created: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        large: Semaphore::new(LARGE_AT_ONCE),
        settings,
        models,
    });
    for listener in &listeners {
        listener.set_nonblocking(true).map_err(failed)?;
    }
    // This thread moves the bytes of all connections; others prepare requests and run the models.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .max_blocking_threads(PREPARING_THREADS)
        .thread_keep_alive(PREPARING_KEPT)
        .thread_name("anemoe-http")
        .thread_stack_size(PREPARING_STACK)
        .enable_all()
        .build()
        .map_err(failed)?;
    // The library panics where the system refuses the first thread.
    let first = std::panic::catch_unwind(AssertUnwindSafe(|| runtime.spawn_blocking(|| ())));
    first.map_err(|_| failed(std::io::Error::other("the system cannot start threads")))?;
    let served = runtime.block_on(accept(&app, listeners, &stop.0));
    app.models.close(true);
    runtime.shutdown_timeout(CLOSING_TIME);
    served.map_err(failed)
}

fn router(app: &Arc<App>) -> Router {
    let answer =
        |api| post(move |State(app): State<Arc<App>>, request: Request| routes::answer(app, request, api));
    Router::new()
        .route("/", get(routes::page))
        .route("/health", get(routes::health))
        .route("/metrics", get(routes::metrics))
        .route("/v1/models", get(routes::models))
        .route("/v1/models/{*id}", get(routes::model))
        .route("/v1/chat/completions", answer(Api::Chat))
        .route("/v1/completions", answer(Api::Completion))
        .route("/v1/responses", answer(Api::Responses))
        .route("/v1/messages", answer(Api::Messages))
        .route("/v1/messages/count_tokens", post(routes::message_tokens))
        .route("/v1/embeddings", post(routes::embeddings))
        .fallback(routes::nothing_here)
        .method_not_allowed_fallback(routes::wrong_method)
        .layer(axum::middleware::from_fn_with_state(Arc::clone(app), routes::authorize_and_log))
        .with_state(Arc::clone(app))
}

/// Accepts connections until `stop`, then waits for open ones to end.
async fn accept(app: &Arc<App>, listeners: Vec<TcpListener>, stop: &Notify) -> std::io::Result<()> {
    let listeners: Vec<_> =
        listeners.into_iter().map(tokio::net::TcpListener::from_std).collect::<std::io::Result<_>>()?;
    let service = router(app);
    let graceful = GracefulShutdown::new();
    let places = Arc::new(Semaphore::new(app.settings.max_connections));
    let idle = Arc::clone(app);
    tokio::spawn(async move {
        loop {
            let app = Arc::clone(&idle);
            let next = tokio::task::spawn_blocking(move || app.models.close_idle()).await;
            tokio::time::sleep(next.unwrap_or(CLOSING_TIME)).await;
        }
    });
    loop {
        let stream = tokio::select! {
            accepted = any_connection(&listeners) => match accepted {
                Ok(stream) => stream,
                Err(e) => {
                    // For instance out of file descriptors: other connections will be closed.
                    tracing::warn!("a connection failed: {e}");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            },
            () = stop.notified() => break,
        };
        match Arc::clone(&places).try_acquire_owned() {
            Ok(place) => serve_connection(app, stream, place, &service, &graceful),
            Err(_) => {
                tokio::spawn(refuse(stream));
            }
        }
    }
    drop(listeners);
    app.models.close(false);
    tracing::info!("closing: {} answers are running", app.models.jobs());
    let mut ended = pin!(graceful.shutdown());
    tokio::select! {
        () = &mut ended => return Ok(()),
        () = tokio::time::sleep(app.settings.grace) => {}
        () = stop.notified() => {}
    }
    app.models.close(true);
    let _ = tokio::time::timeout(CLOSING_TIME, ended).await;
    Ok(())
}

/// Waits for the next connection of any listener.
async fn any_connection(listeners: &[tokio::net::TcpListener]) -> std::io::Result<TcpStream> {
    std::future::poll_fn(|context| {
        let accepted = listeners.iter().map(|listener| listener.poll_accept(context)).find(Poll::is_ready);
        accepted.map_or(Poll::Pending, |ready| ready.map_ok(|(stream, _)| stream))
    })
    .await
}

/// Answers a connection beyond the limit.
async fn refuse(mut stream: TcpStream) {
    let _ = tokio::time::timeout(CLOSING_TIME, async {
        stream.write_all(TOO_MANY).await?;
        stream.shutdown().await
    })
    .await;
}

/// Serves one connection.
fn serve_connection(
    app: &Arc<App>,
    stream: TcpStream,
    place: OwnedSemaphorePermit,
    service: &Router,
    graceful: &GracefulShutdown,
) {
    // Tokens are small and should not wait for each other.
    let _ = stream.set_nodelay(true);
    let routed = TowerToHyperService::new(service.clone());
    // Clients that do not read free their place.
    let mut timed = TimeoutWriter::new(stream);
    timed.set_timeout(Some(app.settings.body_timeout));
    let io = TokioIo::new(Box::pin(timed));
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(app.settings.body_timeout)
        .serve_connection(
            io,
            hyper::service::service_fn(move |mut request| {
                routes::tidy_path(request.uri_mut());
                routed.call(request)
            }),
        );
    let connection = graceful.watch(connection);
    let app = Arc::clone(app);
    tokio::spawn(async move {
        app.models.metrics.connections.add(1);
        if let Err(e) = connection.await {
            tracing::debug!("a connection ended: {e}");
        }
        app.models.metrics.connections.remove(1);
        drop(place);
    });
}
