//! Drafts, as options.

use super::numbers::{at_least_one, choice};
use super::prompt::{MAX_PROMPT, bounded_text};
use anemoe_runtime::model::MOST_UNDONE;
use anemoe_runtime::speculate::{Corpus, Mode, Speculation};
use anemoe_text::tokenizer::Tokenizer;
use anyhow::Context;
use std::path::PathBuf;

/// Most tokens of a corpus; the automaton of one takes some 150 bytes a token.
const MAX_CORPUS: usize = 2_000_000;

/// Drafts from repetitions and of a drafter. Tokens stay the same, whatever is drafted.
#[derive(clap::Args, Clone)]
pub struct SpeculateArgs {
    /// Draft tokens from what repeats, and verify several in one pass: `ngram` wherever something repeats, `auto` where it pays
    /// as measured, `off` never.
    #[arg(long, value_parser = choice([("off", Mode::Off), ("ngram", Mode::Ngram), ("auto", Mode::Auto)]), value_name = "WHEN", default_value = "auto")]
    speculate: Mode,
    /// Most tokens of a draft.
    #[arg(long, value_name = "N", default_value = "8", value_parser = draft_length)]
    draft_max: usize,
    /// Fewest tokens that have to repeat.
    #[arg(long, value_name = "N", default_value = "2", value_parser = at_least_one)]
    ngram_min: usize,
    /// Most tokens of a repetition: of a longer one the newest N are looked for, and what followed them last.
    #[arg(long, value_name = "N", default_value = "24", value_parser = at_least_one)]
    ngram_max: usize,
    /// Text from which tokens are drafted too.
    #[arg(long, value_name = "F")]
    ngram_corpus: Option<PathBuf>,
}

fn draft_length(text: &str) -> Result<usize, String> {
    let n = at_least_one(text)?;
    if n > MOST_UNDONE {
        Err(format!("{n} is more than {MOST_UNDONE}, the most tokens of a draft"))
    } else {
        Ok(n)
    }
}

impl SpeculateArgs {
    /// Returns the condition for drafting.
    pub fn mode(&self) -> Mode {
        self.speculate
    }

    /// Makes the options of drafts; `tokenizer` encodes the corpus.
    pub fn options(&self, tokenizer: Option<&Tokenizer>) -> anyhow::Result<Speculation> {
        let corpus = match &self.ngram_corpus {
            None => None,
            Some(path) => {
                let tokenizer = tokenizer.context("--ngram-corpus needs the model's tokenizer")?;
                let what = format!("--ngram-corpus {}", path.display());
                let text = bounded_text(
                    anemoe_io::open_input(path, MAX_PROMPT).with_context(|| what.clone())?,
                    &what,
                    "text",
                )?;
                let ids = tokenizer.encode(&text, None)?;
                anyhow::ensure!(
                    ids.len() <= MAX_CORPUS,
                    "{what}: {} tokens, where {MAX_CORPUS} are the most",
                    ids.len()
                );
                // Where nothing is drafted, the file is only checked.
                let is_used = self.speculate != Mode::Off;
                is_used.then(|| std::sync::Arc::new(Corpus::new(&ids)))
            }
        };
        let options = Speculation {
            mode: self.speculate,
            draft_max: self.draft_max,
            ngram_min: self.ngram_min,
            ngram_max: self.ngram_max,
            corpus,
            ..Speculation::default()
        };
        options.check().map_err(|what| anyhow::anyhow!("--ngram-min, --ngram-max: {what}"))?;
        Ok(options)
    }
}
