//! `anemoe chat`

mod reader;
mod session;
mod talk;
mod typed_ahead;

use crate::args::model_args::ModelArgs;
use crate::args::numbers::{at_least_one, choice};
use crate::args::reasoning::ReasoningArgs;
use crate::command::{Command, Page};
use crate::error_report::{PartialDocument, sentence};
use crate::signals;
use crate::target::expect_bundle;
use crate::ui::{Ui, message};
use anemoe_io::locked;
use anemoe_runtime::generate::GenerateOptions;
use anemoe_runtime::model::Logits;
use anemoe_runtime::speculate::prepare_drafts;
use anemoe_text::chat::{ChatTemplate, History, Overflow};
use anemoe_text::tokenizer::Tokenizer;
use anyhow::Context;
use reader::Questions;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use talk::{ChatSettings, StopFlag, Talk, handle_signals};

/// Talk with a model.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  anemoe chat small.anemoe\n  anemoe chat small.anemoe --system 'Answer in one sentence.' --session talk.session\n  echo 'What is a hash map?' | anemoe chat small.anemoe\n\nIn the chat: a line is a question; a line that ends in \\ goes on, and \"\"\" begins and ends a question of several lines.\nCtrl-C stops an answer, Ctrl-D ends the chat, /help lists commands."
)]
pub struct Args {
    /// Bundle that `anemoe build` or `anemoe pull` wrote.
    bundle: PathBuf,
    /// Text that the conversation begins with, as the system's.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// File of a chat template (Jinja) in place of the bundle's.
    #[arg(long, value_name = "F")]
    chat_template: Option<PathBuf>,
    /// File that keeps the conversation and the model's state: read at the start if it is there, written at the
    /// end, also when an error or a signal ends the chat.
    #[arg(long, value_name = "F")]
    session: Option<PathBuf>,
    /// Most tokens of an answer [default: the model's own, else 1024].
    #[arg(short = 'n', long, value_name = "N", value_parser = at_least_one)]
    max_new: Option<usize>,
    /// Action when the context is full: `slide` forgets the oldest questions and answers, and never the
    /// system prompt; `stop` refuses the question.
    #[arg(long, value_parser = choice([("slide", Overflow::Slide), ("stop", Overflow::Stop)]), value_name = "HOW", default_value = "slide")]
    overflow: Overflow,
    /// Text that ends an answer; may be given several times.
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    stop: Vec<String>,
    #[command(flatten)]
    reasoning: ReasoningArgs,
    #[command(flatten)]
    run: ModelArgs,
}

/// Most tokens of an answer where neither the command line nor the model says how many.
const MAX_NEW: usize = 1024;

impl Command for Args {
    type Report = Page;

    fn run(self, ui: &Ui) -> anyhow::Result<Page> {
        self.run.check()?;
        expect_bundle(&self.bundle)?;
        if let Some(path) = &self.session {
            session::check_place(path)?;
        }
        let chain = self.run.verify.open(&self.bundle, ui)?;
        let sampling = self.run.sampling.choose(&self.bundle, chain.model.vocab_size)?;
        let started = Instant::now();
        let tokenizer = Tokenizer::open(&self.bundle.join("tokenizer.json"))
            .context("a chat needs the model's tokenizer")?;
        let mut template = ChatTemplate::open(&self.bundle, self.chat_template.as_deref())?;
        self.reasoning.apply(&mut template);
        let model = self.run.open(&self.bundle, &chain)?;
        model.prepare(1, Logits::Last);
        drop(model.populate());
        let speculation = self.run.speculation(&model, Some(&tokenizer), ui)?;
        let mut questions = Questions::open();
        if questions.is_terminal() {
            // While a person reads and types.
            prepare_drafts(&model, &speculation)?;
        }
        let settings = ChatSettings {
            options: GenerateOptions {
                max_new: self.max_new.or(sampling.own.max_new_tokens).unwrap_or(MAX_NEW),
                sampling: sampling.sampling.clone(),
                ignore_eos: false,
                prefill_chunk: None,
                speculation,
            },
            overflow: self.overflow,
            stops: self.stop.clone(),
            shows_thoughts: self.reasoning.is_shown(),
            session: self.session.clone(),
        };
        let mut talk = Talk::new(model, tokenizer, template, settings, History::new(self.system.as_deref()));
        if let Some(path) = self.session.as_deref().filter(|path| path.symlink_metadata().is_ok()) {
            talk.load(path)?;
            if self.system.is_some() {
                message("--system has no effect: the session has its own beginning");
            }
        }
        if talk.has_fallback_template() {
            message(
                "the bundle has no chat template: roles are written as words (--chat-template F gives one)",
            );
        }
        if questions.is_terminal() {
            message(format!(
                "loaded in {:.1} s; /help lists commands, Ctrl-D ends",
                started.elapsed().as_secs_f64()
            ));
        }
        let stop = talk.stop_flag();
        let talk = Arc::new(Mutex::new(talk));
        handle_signals(&talk, &stop, questions.is_terminal());
        let talked = converse(&talk, &stop, &mut questions, ui);
        // Drops the handler's reference to the conversation, so that the model is freed here and not at the end of the process.
        signals::handle(|_| false);
        let talk = locked(&talk);
        let saved = talk.save_session();
        if let (Err(_), Err(e)) = (&talked, &saved) {
            message(format!("error: {}", sentence(e)));
        }
        // An error's document for programs has the answers that were given.
        let document = talk.document(&sampling.document());
        talked.and(saved).with_context(|| PartialDocument(document.clone()))?;
        // The conversation was printed as it went.
        Ok(Page::new(document, [""; 0]))
    }
}

/// Answers questions until there are no more.
fn converse(talk: &Mutex<Talk>, stop: &StopFlag, questions: &mut Questions, ui: &Ui) -> anyhow::Result<()> {
    while let Some(question) = questions.next()? {
        let reaction = locked(talk).react(&question, ui);
        while stop.is_ending() {
            std::thread::park();
        }
        match reaction {
            Ok(true) => {}
            Ok(false) => break,
            // At a terminal the chat goes on after an error.
            Err(e) if questions.is_terminal() => message(format!("error: {}", sentence(&e))),
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
