//! Questions, answers and the commands of a chat.

use super::session;
use crate::commands::generate::stop_name;
use crate::error_report::sentence;
use crate::signals;
use crate::ui::{Ui, message};
use anemoe_io::locked;
use anemoe_runtime::generate::{GenerateOptions, Stop, generate};
use anemoe_runtime::model::{Logits, Model, Sequence};
use anemoe_text::chat::{
    AnswerPiece, ChatTemplate, History, Overflow, PromptText, StopStrings, ThoughtSplitter,
};
use anemoe_text::tokenizer::{TextStream, Tokenizer};
use anyhow::Context;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const HELP: &str = "\
/reset        forgets the conversation, and keeps the system prompt
/save [FILE]  writes the conversation and the model's state to a file
/load [FILE]  goes on from such a file
/stats        tokens and times so far
/help         this list
/quit         ends the chat, as Ctrl-D does
//...          a question that begins with /";

/// Options of a chat.
pub struct ChatSettings {
    /// Options of the answers.
    pub options: GenerateOptions,
    /// Reaction to a full context.
    pub overflow: Overflow,
    /// Texts that end an answer.
    pub stops: Vec<String>,
    /// True if thoughts are shown.
    pub shows_thoughts: bool,
    /// File of `/save` and `/load` without a name.
    pub session: Option<PathBuf>,
}

/// A conversation with a model.
pub struct Talk {
    model: Model,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    settings: ChatSettings,
    history: History,
    sequence: Sequence,
    /// Tokens that end an answer besides the model's own.
    ends: Vec<u32>,
    /// Special tokens around thoughts, which have to be text.
    marks: Vec<u32>,
    stop: StopFlag,
    turns: Vec<Value>,
    totals: ChatTotals,
}

/// Tokens and times of all turns.
#[derive(Default)]
struct ChatTotals {
    prompt: usize,
    reused: usize,
    prefill: Duration,
    decoded: usize,
    decode: Duration,
}

/// Flag by which a signal stops an answer.
#[derive(Clone, Default)]
pub struct StopFlag {
    answering: Arc<AtomicBool>,
    wanted: Arc<AtomicBool>,
    ending: Arc<AtomicBool>,
}

impl StopFlag {
    fn set_answering(&self, on: bool) {
        if on {
            self.wanted.store(false, Ordering::SeqCst);
        }
        self.answering.store(on, Ordering::SeqCst);
    }

    fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::SeqCst) || self.is_ending()
    }

    /// Tells whether a signal is ending the program; the signal's thread needs the conversation to save the session.
    pub fn is_ending(&self) -> bool {
        self.ending.load(Ordering::SeqCst)
    }
}

/// Handles signals of a chat. Ctrl-C at a terminal stops a running answer; every other signal ends the program once the
/// session is saved.
pub fn handle_signals(talk: &Arc<Mutex<Talk>>, stop: &StopFlag, is_terminal: bool) {
    let (talk, stop) = (Arc::clone(talk), stop.clone());
    signals::handle(move |status| {
        if is_terminal && status == signals::BY_CTRL_C && stop.answering.load(Ordering::SeqCst) {
            stop.wanted.store(true, Ordering::SeqCst);
            return true;
        }
        stop.ending.store(true, Ordering::SeqCst);
        // The lock is free once the answer has stopped.
        let talk = locked(&talk);
        if let Err(e) = talk.save_session() {
            message(format!("error: {}", sentence(&e)));
        }
        false
    });
}

/// Reasons for the end of an answer, besides those of generation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AnswerEnd {
    Interrupted,
    StopString,
    EndToken,
}

/// Tokens and text of an unfinished answer.
struct ComingAnswer<'a> {
    text: String,
    thoughts: String,
    ids: Vec<u32>,
    stream: TextStream<'a>,
    stops: StopStrings,
    splitter: ThoughtSplitter,
    ended: Option<AnswerEnd>,
}

impl ComingAnswer<'_> {
    /// Adds a token, and returns the pieces that can be shown now.
    fn push(&mut self, id: u32) -> anemoe_runtime::Result<Vec<AnswerPiece>> {
        self.ids.push(id);
        let (shown, found) = self.stops.push(&self.stream.push(id)?);
        if found {
            self.ended = Some(AnswerEnd::StopString);
        }
        let pieces = self.splitter.push(&shown);
        Ok(self.keep(pieces))
    }

    /// Returns the pieces that were held back, when the answer has ended.
    fn finish(&mut self) -> Vec<AnswerPiece> {
        let held =
            if self.ended == Some(AnswerEnd::StopString) { String::new() } else { self.stops.finish() };
        let mut pieces = self.splitter.push(&held);
        pieces.extend(self.splitter.finish());
        self.keep(pieces)
    }

    fn keep(&mut self, pieces: Vec<AnswerPiece>) -> Vec<AnswerPiece> {
        for piece in &pieces {
            match piece {
                AnswerPiece::Text(text) => self.text += text,
                AnswerPiece::Thought(text) => self.thoughts += text,
            }
        }
        pieces
    }
}

impl Talk {
    /// Makes a conversation with this history and an empty sequence.
    pub fn new(
        model: Model,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        settings: ChatSettings,
        history: History,
    ) -> Talk {
        Talk {
            sequence: model.sequence(),
            ends: template.end_tokens(&tokenizer),
            marks: ThoughtSplitter::marks().filter_map(|name| tokenizer.special_id(name)).collect(),
            stop: StopFlag::default(),
            turns: Vec::new(),
            totals: ChatTotals::default(),
            model,
            tokenizer,
            template,
            settings,
            history,
        }
    }

    /// Returns the flag that stops the conversation's answers.
    pub fn stop_flag(&self) -> StopFlag {
        self.stop.clone()
    }

    /// Tells whether the bundle has no template of its own.
    pub fn has_fallback_template(&self) -> bool {
        self.template.is_fallback()
    }

    /// Answers a question or runs a command; returns false to end the chat.
    pub fn react(&mut self, line: &str, ui: &Ui) -> anyhow::Result<bool> {
        match line.strip_prefix('/') {
            Some(rest) if !rest.starts_with('/') => self.command(rest),
            Some(question) => self.turn(question, ui).map(|()| true),
            None if line.trim().is_empty() => Ok(true),
            None => self.turn(line, ui).map(|()| true),
        }
    }

    fn command(&mut self, line: &str) -> anyhow::Result<bool> {
        let (name, argument) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let argument = argument.trim();
        let file = || {
            let named = (!argument.is_empty()).then(|| PathBuf::from(argument));
            named
                .or_else(|| self.settings.session.clone())
                .with_context(|| format!("/{name} needs the name of a file"))
        };
        match name {
            "help" => message(HELP),
            "reset" => {
                self.history.reset();
                self.sequence.clear();
                message("the conversation is forgotten");
            }
            "save" => self.save(&file()?)?,
            "load" => self.load(&file()?)?,
            "stats" => message(self.stats()),
            "quit" | "exit" | "bye" => return Ok(false),
            _ => anyhow::bail!("there is no command /{name}; /help lists commands"),
        }
        Ok(true)
    }

    /// Writes the session to the file of `--session`, if there is one.
    pub fn save_session(&self) -> anyhow::Result<()> {
        self.settings.session.as_deref().map_or(Ok(()), |path| self.save(path))
    }

    /// Writes the session to a file.
    fn save(&self, path: &Path) -> anyhow::Result<()> {
        session::save(path, &self.model, &self.sequence, &self.history)?;
        message(format!("saved {} tokens to {}", self.sequence.position(), path.display()));
        Ok(())
    }

    /// Reads the session of a file.
    pub fn load(&mut self, path: &Path) -> anyhow::Result<()> {
        (self.sequence, self.history) = session::load(path, &self.model)?;
        message(format!("loaded {} tokens from {}", self.sequence.position(), path.display()));
        Ok(())
    }

    /// Formats the tokens and times so far.
    fn stats(&self) -> String {
        let t = &self.totals;
        let rate = |n: usize, d: Duration| if n == 0 { 0.0 } else { n as f64 / d.as_secs_f64().max(1e-9) };
        format!(
            "{}; prompts {} tokens, {} of them from the turns before; {} run at {:.0} tok/s; {} decoded at {:.1} tok/s; \
             context {} of {} tokens",
            match self.turns.len() {
                1 => "1 answer".to_string(),
                n => format!("{n} answers"),
            },
            t.prompt,
            t.reused,
            t.prompt - t.reused,
            rate(t.prompt - t.reused, t.prefill),
            t.decoded,
            rate(t.decoded, t.decode),
            self.sequence.position(),
            self.model.chain().model.max_context
        )
    }

    /// Returns the chat as a document for programs.
    pub fn document(&self, sampling: &Value) -> Value {
        let fallback = self.template.is_fallback();
        json!({"turns": self.turns, "messages": self.history.messages, "fallback_template": fallback, "sampling": sampling})
    }

    /// Answers one question.
    fn turn(&mut self, question: &str, ui: &Ui) -> anyhow::Result<()> {
        let context = self.model.chain().model.max_context;
        // An answer gets at least a quarter of the context, or all the tokens that it may have.
        let room = context - self.settings.options.max_new.min(context / 4);
        let overflow = self.settings.overflow;
        let turn = self.history.ask(question, &self.template, &self.tokenizer, room, overflow)?;
        if turn.dropped > 0 {
            message(format!("the context is full: the oldest {} messages are forgotten", turn.dropped));
        }
        self.stop.set_answering(true);
        let answered = self.answer(turn.prompt, ui);
        self.stop.set_answering(false);
        if answered.is_err() {
            self.history.take_back();
            // A failed pass may have changed some states and not others.
            self.sequence.clear();
        }
        answered
    }

    /// Runs the tokens of a prompt that the sequence does not begin with, except those of the last pass; returns false
    /// after Ctrl-C.
    fn prefill(&mut self, prompt: &[u32]) -> anyhow::Result<bool> {
        let shared = self.sequence.shared_with(&prompt[..prompt.len() - 1]);
        match shared {
            0 => self.sequence.clear(),
            _ => self.model.truncate(&mut self.sequence, shared)?,
        }
        let pass = self.model.most_tokens(None);
        while prompt.len() - self.sequence.position() > pass {
            let first = self.sequence.position();
            self.model.append(&mut self.sequence, &prompt[first..first + pass], Logits::None, None)?;
            if self.stop.is_wanted() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn answer(&mut self, prompt: PromptText, ui: &Ui) -> anyhow::Result<()> {
        anyhow::ensure!(
            !prompt.ids.is_empty(),
            "the prompt is empty: the chat template makes nothing of the question"
        );
        let reused = self.sequence.shared_with(&prompt.ids[..prompt.ids.len() - 1]);
        let started = Instant::now();
        if !self.prefill(&prompt.ids)? {
            self.history.take_back();
            message("\nstopped before the answer; the question is taken back");
            return Ok(());
        }
        let mut prefill = started.elapsed();
        let own_stops = self.template.stop_strings().into_iter().map(str::to_string);
        let messages = &self.history.messages;
        let beginning = self.template.beginning_of_answer(&prompt.text, messages, None, &Map::new())?;
        let mut answer = ComingAnswer {
            text: String::new(),
            thoughts: String::new(),
            ids: Vec::new(),
            stream: TextStream::new(&self.tokenizer, &prompt.ids)?.with_marks(self.marks.clone()),
            splitter: ThoughtSplitter::new(&beginning),
            stops: StopStrings::new(own_stops.chain(self.settings.stops.iter().cloned())),
            ended: None,
        };
        let mut options = self.settings.options.clone();
        // Every turn has another seed.
        options.sampling.seed = options.sampling.seed.wrapping_add(self.turns.len() as u64);
        let (ends, stop) = (&self.ends, &self.stop);
        let mut shown = ShownAnswer { ui, shows_thoughts: self.settings.shows_thoughts, is_thinking: false };
        let mut failure: Option<anyhow::Error> = None;
        let generated = generate(&self.model, &mut self.sequence, &prompt.ids, &options, |id| {
            if ends.contains(&id) {
                answer.ended = Some(AnswerEnd::EndToken);
                return false;
            }
            let pieces = answer.push(id).map_err(anyhow::Error::from);
            if let Err(e) = pieces.and_then(|pieces| shown.add(&pieces)) {
                failure = Some(e);
                return false;
            }
            if stop.is_wanted() && answer.ended.is_none() {
                answer.ended = Some(AnswerEnd::Interrupted);
            }
            answer.ended.is_none()
        })?;
        if let Some(e) = failure {
            return Err(e);
        }
        shown.add(&answer.finish())?;
        shown.end_thoughts()?;
        ui.line("")?;
        prefill += generated.prefill;
        let ended = match (answer.ended, generated.stop) {
            (Some(AnswerEnd::Interrupted), _) => "interrupted",
            (Some(AnswerEnd::StopString), _) => "stop_string",
            (Some(AnswerEnd::EndToken), _) => "end_token",
            (None, stop) => stop_name(stop),
        };
        if generated.stop == Stop::ContextFull {
            message("the context is full: the answer ends here");
        }
        let prompt_tokens = prompt.ids.len();
        self.totals.prompt += prompt_tokens;
        self.totals.reused += reused;
        self.totals.prefill += prefill;
        self.totals.decoded += generated.decode_tokens;
        self.totals.decode += generated.decode;
        let drafts = generated.speculation.as_ref().filter(|r| r.drafted > 0);
        let drafts =
            drafts.map_or(String::new(), |r| format!(" ({} of {} drafted right)", r.accepted, r.drafted));
        message(format!(
            "[prompt {prompt_tokens} tokens, {reused} of them known, {:.2} s; {} tokens, {:.1} tok/s{drafts}; context {} of {}; {}]",
            prefill.as_secs_f64(),
            answer.ids.len(),
            generated.tokens_per_second(),
            self.sequence.position(),
            self.model.chain().model.max_context,
            ended.replace('_', " "),
        ));
        self.turns.push(json!({
            "text": answer.text,
            "thoughts": answer.thoughts,
            "generated_ids": answer.ids,
            "stop": ended,
            "prompt_tokens": prompt_tokens,
            "reused_tokens": reused,
            "timing": {
                "prefill_tokens": prompt_tokens - reused,
                "prefill_s": prefill.as_secs_f64(),
                "decode_tokens": generated.decode_tokens,
                "decode_s": generated.decode.as_secs_f64(),
                "decode_tok_s": generated.tokens_per_second(),
            },
            "speculation": generated.speculation,
        }));
        // After a stop string or thoughts, the tokens hold more than the text.
        let is_text = answer.ended != Some(AnswerEnd::StopString) && answer.thoughts.is_empty();
        let ids = is_text.then_some(answer.ids.as_slice());
        self.history.answer(prompt, &answer.text, ids);
        Ok(())
    }
}

/// An answer on the screen, its thoughts on lines of their own.
struct ShownAnswer<'a> {
    ui: &'a Ui,
    shows_thoughts: bool,
    is_thinking: bool,
}

impl ShownAnswer<'_> {
    fn add(&mut self, pieces: &[AnswerPiece]) -> anyhow::Result<()> {
        for piece in pieces {
            match piece {
                AnswerPiece::Thought(text) if self.shows_thoughts => {
                    self.ui.thought(text)?;
                    self.is_thinking = true;
                }
                AnswerPiece::Thought(_) => {}
                AnswerPiece::Text(text) => {
                    self.end_thoughts()?;
                    self.ui.part(text)?;
                }
            }
        }
        Ok(())
    }

    fn end_thoughts(&mut self) -> anyhow::Result<()> {
        if std::mem::take(&mut self.is_thinking) {
            self.ui.thought("\n\n")?;
        }
        Ok(())
    }
}
