//! The models of a server: opened at first use, closed when nobody used them for a while.

use super::api_error::ApiError;
use crate::batching::{BatchLimits, Batcher};
use crate::counters::ServerCounters;
use crate::grammar::Grammars;
use crate::tool_calls::CallForm;
use crate::{Error, Result};
use anemoe_io::locked;
use anemoe_runtime::model::Model;
use anemoe_runtime::sampler::SamplingDefaults;
use anemoe_runtime::speculate::Speculation;
use anemoe_text::chat::{ChatTemplate, ThoughtSplitter};
use anemoe_text::tokenizer::Tokenizer;
use axum::http::StatusCode;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Code of the error of a request whose model has to wait until another one is closed.
pub const BUSY: &str = "busy";
/// Time for which a request that waits for a place keeps others from taking one.
const TURN: Duration = Duration::from_secs(1);

/// A bundle that was opened.
pub struct OpenedBundle {
    /// The model.
    pub model: Model,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// Its chat template.
    pub template: ChatTemplate,
    /// Sampling where a request sets nothing.
    pub defaults: SamplingDefaults,
    /// Settings of drafts, for streams that run alone.
    pub speculation: Speculation,
}

/// Opens a bundle.
pub type OpenBundle = Box<dyn Fn() -> Result<OpenedBundle> + Send + Sync>;

/// A model that is ready to answer.
pub struct ServedModel {
    /// Name in requests.
    pub id: String,
    /// The model.
    pub model: Arc<Model>,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Its chat template.
    pub template: ChatTemplate,
    /// Sampling where a request sets nothing.
    pub defaults: SamplingDefaults,
    /// Form of tool calls in the model's answers; `None` for an unknown form.
    pub call_form: Option<CallForm>,
    /// Tokens that end a chat's answer.
    pub ends: Vec<u32>,
    /// Special tokens around thoughts, which have to be text.
    pub marks: Vec<u32>,
    /// Batcher that runs jobs.
    pub batcher: Batcher,
    /// Maker of grammars.
    pub grammars: Grammars,
}

impl ServedModel {
    fn new(
        id: &str,
        opened: OpenedBundle,
        metrics: &Arc<ServerCounters>,
        limits: BatchLimits,
    ) -> Result<ServedModel> {
        let OpenedBundle { model, tokenizer, template, defaults, speculation } = opened;
        let (model, tokenizer) = (Arc::new(model), Arc::new(tokenizer));
        let batcher = Batcher::start(
            Arc::clone(&model),
            Arc::clone(&tokenizer),
            Arc::clone(metrics),
            limits,
            speculation,
        );
        Ok(ServedModel {
            id: id.into(),
            call_form: CallForm::of(&template),
            ends: template.end_tokens(&tokenizer),
            marks: ThoughtSplitter::marks().filter_map(|name| tokenizer.special_id(name)).collect(),
            batcher: batcher.map_err(|e| Error::io(Path::new("server"), e))?,
            grammars: Grammars::default(),
            model,
            tokenizer,
            template,
            defaults,
        })
    }
}

impl Drop for ServedModel {
    fn drop(&mut self) {
        self.batcher.abort();
    }
}

/// A bundle of the server, open or not.
struct ModelPlace {
    id: String,
    open: OpenBundle,
    /// The model and the time of its last use, while it is open.
    model: Mutex<Option<(Arc<ServedModel>, Instant)>>,
}

impl ModelPlace {
    /// Returns the time of the last use; `None` while the model is closed or in use.
    fn unused_since(&self) -> Option<Instant> {
        let mut place = self.model.try_lock().ok()?;
        let (model, used) = place.as_mut()?;
        if model.batcher.jobs() > 0 || Arc::strong_count(model) > 1 {
            *used = Instant::now();
            return None;
        }
        Some(*used)
    }

    /// Closes the model, if nobody has used it since then.
    fn close(&self, since: Instant) {
        if self.unused_since() == Some(since) {
            let model =
                locked(&self.model).take_if(|(model, used)| *used == since && Arc::strong_count(model) == 1);
            tracing::info!(id = self.id, closed = model.is_some(), "nobody uses the model");
        }
    }
}

/// The models of a server.
pub struct Models {
    places: Vec<ModelPlace>,
    /// Most models that are open together.
    most_open: usize,
    /// Time without use after which a model is closed.
    idle: Option<Duration>,
    limits: BatchLimits,
    pub(super) metrics: Arc<ServerCounters>,
    is_closing: AtomicBool,
    /// Name of the model that waits for a place, and when it last asked: it comes before those that are open.
    waiting: Mutex<Option<(String, Instant)>>,
    /// Held while a model is opened: one at a time.
    opening: Mutex<()>,
}

impl Models {
    /// Makes the set of the bundles with these names, of which `most_open` are open together, each until nobody used it
    /// for `idle`.
    pub fn new(
        bundles: Vec<(String, OpenBundle)>,
        most_open: usize,
        idle: Option<Duration>,
        limits: BatchLimits,
    ) -> Models {
        let places =
            bundles.into_iter().map(|(id, open)| ModelPlace { id, open, model: Mutex::new(None) }).collect();
        let (metrics, waiting, opening) = Default::default();
        Models {
            places,
            most_open,
            idle,
            limits,
            metrics,
            is_closing: AtomicBool::new(false),
            waiting,
            opening,
        }
    }

    /// Returns the names of all models.
    pub fn ids(&self) -> impl Iterator<Item = &str> {
        self.places.iter().map(|place| place.id.as_str())
    }

    /// Opens the only model, so that faults show before the first request; of several, none.
    ///
    /// # Errors
    /// The bundle cannot be opened.
    pub fn open_single(&self) -> Result<()> {
        match self.places.as_slice() {
            [place] => self.open(place).map(drop),
            _ => Ok(()),
        }
    }

    fn open(&self, place: &ModelPlace) -> Result<Arc<ServedModel>> {
        let mut held = locked(&place.model);
        if let Some((model, used)) = held.as_mut() {
            *used = Instant::now();
            return Ok(Arc::clone(model));
        }
        let started = Instant::now();
        let model = Arc::new(ServedModel::new(&place.id, (place.open)()?, &self.metrics, self.limits)?);
        tracing::info!(id = place.id, ms = started.elapsed().as_millis() as u64, "opened a model");
        *held = Some((Arc::clone(&model), Instant::now()));
        Ok(model)
    }

    /// Returns a model by its name, opened if need be; without a name, the only one.
    ///
    /// # Errors
    /// There is no such model, its bundle cannot be opened, or too many others are in use.
    pub fn get(&self, name: Option<&str>) -> std::result::Result<Arc<ServedModel>, ApiError> {
        if self.is_closing() {
            return Err(ApiError::closing());
        }
        // Some clients send an empty name where none is set.
        let place = match (name.filter(|name| !name.is_empty()), self.places.as_slice()) {
            (None, [place]) => place,
            (None, _) => {
                let what = format!("it is missing; this server has {}", self.names());
                return Err(ApiError::param("model", what));
            }
            (Some(name), places) => places.iter().find(|place| place.id == name).ok_or_else(|| {
                let what =
                    format!("there is no model `{}`; this server has {}", name.escape_debug(), self.names());
                ApiError { param: Some("model".into()), ..ApiError::new(StatusCode::NOT_FOUND, what) }
                    .with_code("model_not_found")
            })?,
        };
        let busy = || {
            let what = "all models that may be open together are in use; try again later";
            ApiError::unavailable(what, BUSY)
        };
        let is_other = |(id, asked): &(String, Instant)| *id != place.id && asked.elapsed() < TURN;
        if locked(&self.waiting).as_ref().is_some_and(is_other) {
            return Err(busy());
        }
        let is_open = |place: &ModelPlace| locked(&place.model).is_some();
        let _alone = (!is_open(place)).then(|| locked(&self.opening));
        if _alone.is_some() && !is_open(place) && !self.make_room() {
            *locked(&self.waiting) = Some((place.id.clone(), Instant::now()));
            return Err(busy());
        }
        locked(&self.waiting).take_if(|(id, _)| *id == place.id);
        self.open(place).map_err(|e| {
            tracing::error!("{e}");
            ApiError::new(
                StatusCode::SERVICE_UNAVAILABLE,
                format!("the model cannot be opened: {}", e.what()),
            )
        })
    }

    /// Closes the model that was unused for longest, if as many are open as may be; returns false if all are in use.
    fn make_room(&self) -> bool {
        let open = || self.places.iter().filter(|place| locked(&place.model).is_some()).count();
        while open() >= self.most_open {
            let unused = self.places.iter().filter_map(|place| Some((place.unused_since()?, place)));
            let Some((since, place)) = unused.min_by_key(|(since, _)| *since) else { return false };
            place.close(since);
        }
        true
    }

    fn names(&self) -> String {
        self.ids().map(|id| format!("`{id}`")).collect::<Vec<_>>().join(", ")
    }

    /// Returns the models that are open.
    pub fn open_models(&self) -> Vec<Arc<ServedModel>> {
        // A place that is locked is being opened.
        let open = |place: &ModelPlace| Some(Arc::clone(&place.model.try_lock().ok()?.as_ref()?.0));
        self.places.iter().filter_map(open).collect()
    }

    /// Tells whether the server takes no more requests.
    pub fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::SeqCst)
    }

    /// Takes no more requests; with `gives_up`, those that wait or run fail.
    pub fn close(&self, gives_up: bool) {
        self.is_closing.store(true, Ordering::SeqCst);
        for model in self.open_models() {
            if gives_up { model.batcher.give_up() } else { model.batcher.close() }
        }
    }

    /// Returns the number of answers that wait or run.
    pub fn jobs(&self) -> usize {
        self.open_models().iter().map(|model| model.batcher.jobs()).sum()
    }

    /// Closes the models that nobody used for a while. Returns the time until this is worth another look.
    pub fn close_idle(&self) -> Duration {
        let Some(idle) = self.idle else { return Duration::from_secs(3600) };
        let mut next = idle;
        for place in &self.places {
            match place.unused_since() {
                Some(since) if since.elapsed() >= idle => place.close(since),
                Some(since) => next = next.min(idle - since.elapsed().min(idle)),
                None => {}
            }
        }
        next.clamp(Duration::from_millis(50), Duration::from_secs(60))
    }
}
