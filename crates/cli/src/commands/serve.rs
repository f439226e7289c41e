//! `anemoe serve`

use crate::args::model_args::ModelArgs;
use crate::args::numbers::at_least_one;
use crate::args::reasoning::ReasoningArgs;
use crate::command::{Command, Page};
use crate::signals;
use crate::target::expect_bundle;
use crate::ui::{Ui, message};
use anemoe_bundle::Chain;
use anemoe_io::locked;
use anemoe_runtime::model::Logits;
use anemoe_server::Error;
use anemoe_server::batching::BatchLimits;
use anemoe_server::http::{
    Models, OpenBundle, OpenedBundle, ServerSettings, ShutdownSwitch, parse_origin, serve,
};
use anemoe_server::listen_host::{ListenHost, Listening};
use anemoe_text::chat::ChatTemplate;
use anemoe_text::tokenizer::Tokenizer;
use anyhow::Context;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Largest file of API keys, in bytes.
const MAX_KEYS: u64 = 1 << 20;

/// Serve models as OpenAI's API does, and Anthropic's.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  anemoe serve small.anemoe\n  anemoe serve small.anemoe --port 9000 --api-key-file keys.txt\n  anemoe serve small.anemoe large.anemoe --max-models 1 --idle 600\n  curl http://127.0.0.1:8080/v1/chat/completions -H 'content-type: application/json' -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'\n\nOf several bundles, `model` of a request names one: the file's name without its ending. Each is opened when it is first asked for.\nA chat page is at http://127.0.0.1:8080/. Ctrl-C lets running answers end; a second Ctrl-C does not."
)]
pub struct Args {
    /// Bundles that `anemoe build` or `anemoe pull` wrote.
    #[arg(required = true, value_name = "BUNDLE")]
    bundles: Vec<PathBuf>,
    /// Address to listen at, or localhost (127.0.0.1 and ::1); other machines reach only another one than these.
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    host: ListenHost,
    /// Port to listen at; 0 takes a free one.
    #[arg(long, value_name = "N", default_value_t = 8080)]
    port: u16,
    /// Name of the model for clients, of a single bundle [default: that of the bundle].
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    model_name: Option<String>,
    /// File of API keys, one a line; without it, everybody who reaches the port may ask.
    #[arg(long, value_name = "F")]
    api_key_file: Option<PathBuf>,
    /// Most bundles that are open together: the longest unused one is closed for another. Each takes the memory of its weights
    /// and of the caches of `--max-sequences` and `--prefix-cache` [default: all].
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    max_models: Option<usize>,
    /// Seconds without a request after which one of several bundles is closed; the next request opens it again [default: never].
    #[arg(long, value_name = "S", value_parser = at_least_one)]
    idle: Option<usize>,
    /// Name of this server in its clients' URLs, besides localhost and addresses; may be given several times, * allows all.
    /// With API keys any name does.
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    allow_host: Vec<String>,
    /// Origin whose pages may ask, such as http://localhost:3000, or *; may be given several times.
    #[arg(long, value_name = "ORIGIN", value_parser = parse_origin)]
    cors: Vec<String>,
    /// File of a chat template (Jinja) in place of the bundle's.
    #[arg(long, value_name = "F")]
    chat_template: Option<PathBuf>,
    /// Most sequences that run together.
    #[arg(long, value_name = "N", default_value = "32", value_parser = at_least_one)]
    max_sequences: usize,
    /// Most requests that wait for one of them; more are refused.
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_queue: usize,
    /// Sequences that are kept for prompts that begin with the same tokens.
    #[arg(long, value_name = "N", default_value_t = 16)]
    prefix_cache: usize,
    /// Milliseconds that streams may wait for a piece of another's prompt: pieces are as large as that allows, by measured
    /// times, and have 16 tokens at least.
    #[arg(long, value_name = "MS", default_value_t = 250)]
    max_stall: u64,
    /// Most new tokens of an answer [default: what the context holds].
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    max_tokens: Option<usize>,
    /// Most bytes of a request.
    #[arg(long, value_name = "BYTES", default_value = "4000000", value_parser = at_least_one)]
    max_body: usize,
    /// Most open connections.
    #[arg(long, value_name = "N", default_value = "512", value_parser = at_least_one)]
    max_connections: usize,
    /// Most seconds of a request, from its arrival to the end of its answer.
    #[arg(long, value_name = "S", default_value = "600", value_parser = at_least_one)]
    timeout: usize,
    /// Seconds that a client has to send the head of a request, and again its body, and to take what it is sent.
    #[arg(long, value_name = "S", default_value = "30", value_parser = at_least_one)]
    client_timeout: usize,
    /// Seconds that running answers have when the server ends.
    #[arg(long, value_name = "S", default_value_t = 30)]
    grace: u64,
    #[command(flatten)]
    reasoning: ReasoningArgs,
    #[command(flatten)]
    run: ModelArgs,
}

impl Args {
    fn settings(&self) -> anyhow::Result<ServerSettings> {
        let seconds = |n: usize| Duration::from_secs(n as u64);
        Ok(ServerSettings {
            keys: self.api_key_file.as_deref().map(keys).transpose()?.unwrap_or_default(),
            hosts: self.allow_host.clone(),
            origins: self.cors.clone(),
            shows_thoughts: self.reasoning.is_shown(),
            most_answers: self.max_sequences + self.max_queue,
            max_tokens: self.max_tokens,
            max_body: self.max_body,
            max_connections: self.max_connections,
            request_timeout: seconds(self.timeout),
            body_timeout: seconds(self.client_timeout),
            grace: Duration::from_secs(self.grace),
        })
    }

    fn batch_limits(&self) -> BatchLimits {
        BatchLimits {
            sequences: self.max_sequences,
            queue: self.max_queue,
            prefixes: self.prefix_cache,
            stall: Duration::from_millis(self.max_stall),
        }
    }

    /// Returns the bundles with their names.
    fn names(&self) -> anyhow::Result<Vec<(String, &Path)>> {
        let mut all: Vec<(String, &Path)> = Vec::new();
        anyhow::ensure!(
            self.model_name.is_none() || self.bundles.len() == 1,
            "--model-name names the model of a single bundle; of several, each has the name of its file"
        );
        for bundle in &self.bundles {
            let name = self.model_name.clone().unwrap_or_else(|| name_of(bundle));
            if let Some((_, other)) = all.iter().find(|(known, _)| *known == name) {
                anyhow::bail!("{} and {}: both are called `{name}`", other.display(), bundle.display());
            }
            all.push((name, bundle));
        }
        Ok(all)
    }

    /// Opens a bundle to be served.
    fn open(&self, bundle: &Path, chain: &Chain) -> anyhow::Result<OpenedBundle> {
        let file = bundle.join("tokenizer.json");
        let tokenizer = Tokenizer::open(&file).context("a server needs the model's tokenizer")?;
        let mut template = ChatTemplate::open(bundle, self.chat_template.as_deref())?;
        self.reasoning.apply(&mut template);
        let model = self.run.open(bundle, chain)?;
        model.prepare(1, Logits::Last);
        drop(model.populate());
        let defaults = self.run.sampling.defaults(bundle)?;
        Ok(OpenedBundle {
            speculation: self.run.speculation(&model, Some(&tokenizer), &Ui::inner())?,
            model,
            tokenizer,
            template,
            defaults,
        })
    }
}

/// Returns the bundle's name without its ending.
fn name_of(bundle: &Path) -> String {
    let whole = bundle.canonicalize().unwrap_or_else(|_| bundle.to_path_buf());
    whole.file_stem().map_or("model".into(), |n| n.to_string_lossy().into_owned())
}

/// Reads the keys of a file, without empty lines and lines that begin with `#`.
fn keys(path: &Path) -> anyhow::Result<Vec<String>> {
    let named = || format!("--api-key-file {}", path.display());
    let text = anemoe_io::read_text(path, MAX_KEYS).with_context(named)?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let keys: Vec<String> = lines.map(str::to_string).collect();
    anyhow::ensure!(!keys.is_empty(), "{}: there is no key in it", named());
    Ok(keys)
}

impl Command for Args {
    type Report = Page;

    fn run(self, ui: &Ui) -> anyhow::Result<Page> {
        self.run.check()?;
        self.bundles.iter().try_for_each(|bundle| expect_bundle(bundle))?;
        anyhow::ensure!(
            !self.run.names_drafter() || self.bundles.len() == 1,
            "--drafter drafts for a single bundle; of several, each has the drafter in it"
        );
        let args = Arc::new(self);
        let names = args.names()?;
        let settings = args.settings()?;
        let Listening { listeners, url } = args.host.listen(args.port)?;
        let started = Instant::now();
        let mut bundles: Vec<(String, OpenBundle)> = Vec::new();
        for (name, bundle) in &names {
            let chain = args.run.verify.open(bundle, ui)?;
            // The first request should not find what is wrong with the only bundle.
            let opened = if names.len() == 1 { Some(args.open(bundle, &chain)?) } else { None };
            if opened.as_ref().is_some_and(|opened| opened.template.is_fallback()) {
                message(
                    "the bundle has no chat template: roles are written as words (--chat-template F gives one)",
                );
            }
            let (args, bundle, opened) = (Arc::clone(&args), bundle.to_path_buf(), Mutex::new(opened));
            let open = move || match locked(&opened).take() {
                Some(opened) => Ok(opened),
                None => args.open(&bundle, &chain).map_err(|e| Error::input(format!("{e:#}"))),
            };
            bundles.push((name.clone(), Box::new(open)));
        }
        let ids: Vec<String> = names.iter().map(|(name, _)| name.clone()).collect();
        let idle = args.idle.filter(|_| ids.len() > 1).map(|s| Duration::from_secs(s as u64));
        let models = Models::new(bundles, args.max_models.unwrap_or(usize::MAX), idle, args.batch_limits());
        models.open_single()?;
        let stop = Arc::new(ShutdownSwitch::default());
        let asked = Arc::clone(&stop);
        let is_first = AtomicBool::new(true);
        // The first signal asks for an end, the second for an end at once; the third ends the process.
        let mut left = 2;
        signals::handle(move |_| {
            if is_first.swap(false, Ordering::SeqCst) {
                message("closing: running answers may end");
            }
            asked.stop();
            left -= 1;
            left >= 0
        });
        if !args.host.is_loopback() && settings.keys.is_empty() {
            message("warning: everybody who reaches this port may ask; --api-key-file F asks for a key");
        }
        let seconds = started.elapsed().as_secs_f64();
        let line = format!("{} at {url} (loaded in {seconds:.1} s)", ids.join(", "));
        let document = json!({"url": url, "model": ids.first(), "models": ids});
        let later = move || Ok(serve(settings, models, listeners, &stop)?);
        Ok(Page { later: Some(Box::new(later)), ..Page::new(document, [line]) })
    }
}
