//! One file per sub-command.

use crate::command::execute;
use crate::ui::Ui;

/// Lists the sub-commands: each has a module with its `Args`.
macro_rules! commands {
    ($($(#[$attribute:meta])* $name:ident in $module:ident,)*) => {
        $(pub mod $module;)*

        /// A sub-command with its arguments.
        #[derive(clap::Subcommand)]
        pub enum AnyCommand {
            $($(#[$attribute])* $name(Box<$module::Args>),)*
        }

        impl AnyCommand {
            /// Runs the command, and reports what came out; returns whether its gate passed.
            pub fn run(self, ui: &Ui) -> anyhow::Result<bool> {
                match self {
                    $(AnyCommand::$name(args) => execute(*args, ui),)*
                }
            }
        }
    };
}

commands! {
    Quickstart in quickstart,
    Inspect in inspect,
    Plan in plan,
    Forms in forms,
    Build in build,
    Assemble in assemble,
    Check in check,
    #[command(hide = true)]
    Compile in compile,
    Golden in golden,
    Calibrate in calibrate,
    Perplexity in perplexity,
    Validate in validate,
    Trace in trace,
    Tune in tune,
    Generate in generate,
    Chat in chat,
    Serve in serve,
    Bench in bench,
    Predict in predict,
    PredictSpeed in predict_speed,
    Quantize in quantize,
    Journal in journal,
    Reproduce in reproduce,
    Report in report,
    Push in push,
    Pull in pull,
    Doctor in doctor,
    #[command(hide = true)]
    VerifyOnMac in verify_on_mac,
    #[command(hide = true)]
    ImportReport in import_report,
    #[command(hide = true)]
    Completions in completions,
    #[command(hide = true)]
    Man in man,
    #[command(hide = true)]
    Step in step,
}
