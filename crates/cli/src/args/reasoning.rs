//! Option for the thoughts of a model.

use anemoe_text::chat::ChatTemplate;

/// Treatment of thoughts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Thoughts {
    Show,
    Hide,
    Off,
}

/// Options of a model's thoughts.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct ReasoningArgs {
    /// Thoughts of a model before its answer: `show` them apart from it, `hide` them, or tell the model not to think (`off`).
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = Thoughts::Show)]
    reasoning: Thoughts,
}

impl ReasoningArgs {
    /// Tells whether thoughts are shown.
    pub fn is_shown(self) -> bool {
        self.reasoning == Thoughts::Show
    }

    /// Tells the template whether the model should think, where this was said.
    pub fn apply(self, template: &mut ChatTemplate) {
        if self.reasoning == Thoughts::Off {
            ChatTemplate::thinking(false).for_each(|(name, value)| template.set(&name, value));
        }
    }
}
