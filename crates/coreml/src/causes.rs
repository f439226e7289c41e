//! Likely causes of errors of Core ML and of steps that crash or hang, as others reported them, and the form to try next.

use serde::{Deserialize, Serialize};

/// End of a step or a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// Done, or the gate passed.
    Done,
    /// The gate failed, or a part of the work did.
    Failed,
    /// Core ML, or the program, returned an error or raised an exception.
    Refused,
    /// The process ended without an answer.
    Crashed,
    /// The process took too long, and was ended.
    Hung,
    /// Nothing was run.
    Skipped,
}

impl End {
    /// Returns the end as a word.
    pub const fn word(self) -> &'static str {
        match self {
            End::Done => "done",
            End::Failed => "failed",
            End::Refused => "refused",
            End::Crashed => "crashed",
            End::Hung => "hung",
            End::Skipped => "skipped",
        }
    }

    /// Tells whether the end is a finding against the Mac or the bundle.
    pub const fn is_failure(self) -> bool {
        !matches!(self, End::Done | End::Skipped)
    }
}

/// A likely cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cause {
    /// Cause, in words.
    pub text: &'static str,
    /// Advice other than a form to try; may be empty.
    pub advice: &'static str,
    /// Forms to try, as option and value of `anemoe build`, the most promising first.
    pub forms: &'static [(&'static str, &'static str)],
}

/// A rule: conditions, and the causes of a failure that meets them.
struct CauseRule {
    end: Option<End>,
    step: Option<&'static str>,
    /// Texts in lower case; the message must contain one of them. An empty list matches every message.
    message_parts: &'static [&'static str],
    causes: &'static [Cause],
}

const fn cause(
    text: &'static str,
    advice: &'static str,
    forms: &'static [(&'static str, &'static str)],
) -> Cause {
    Cause { text, advice, forms }
}

/// Makes a rule about messages, whatever the step and its end.
const fn says(message_parts: &'static [&'static str], causes: &'static [Cause]) -> CauseRule {
    CauseRule { end: None, step: None, message_parts, causes }
}

/// Forms to try for any shard where nothing more specific is known.
const ANY_FORM: &[(&str, &str)] = &[
    ("--cache", "host"),
    ("--attention", "per-head"),
    ("--experts", "bank"),
    ("--activation", "sigmoid"),
    ("--io", "channels-last"),
    ("--norm", "plain"),
];

/// Texts, in lower case, of errors about an execution plan that could not be built.
const NO_PLAN: &[&str] = &["error code: -14", "coreml -14"];
/// Cause of an unbuildable plan that is excluded where the model was compiled just before.
pub const STALE: Cause =
    cause("it was compiled for another version of the system or another chip", "anemoe compile --again", &[]);

/// Rules; the first that matches decides.
const RULES: &[CauseRule] = &[
    says(
        &["no space left", "disk is full", "nospc"],
        &[cause("the disk is full", "free some room (anemoe doctor --clean lists caches)", &[])],
    ),
    says(
        &["bad_cast"],
        &[cause(
            "flexible numbers of tokens beside states",
            "build with fixed numbers of tokens: --tokens 1,8",
            &[("--cache", "host")],
        )],
    ),
    says(
        NO_PLAN,
        &[
            STALE,
            cause(
                "a form that this Neural Engine does not take; states are refused most often",
                "",
                &[
                    ("--cache", "host"),
                    ("--history", "host"),
                    ("--experts", "bank"),
                    ("--activation", "sigmoid"),
                    ("--io", "channels-last"),
                ],
            ),
            cause(
                "blocks of scales, or tables with scales",
                "another kind of compression: --quant lut4 or --quant int8-tensor",
                &[],
            ),
            cause(
                "too much in one package, or loaded at once",
                "smaller packages (--experts-per-shard, --ffn-shards), or --max-loaded when it runs",
                &[],
            ),
        ],
    ),
    says(
        &["aneccompile", "anef", "error 11", "code 11", "error=11"],
        &[cause(
            "the Neural Engine's compiler refuses a function: too large, too long, or several numbers of tokens with states",
            "smaller packages (--ffn-shards), a shorter --max-context, or --functions apart",
            &[("--cache", "host"), ("--attention", "per-head"), ("--experts", "bank"), ("--norm", "plain")],
        )],
    ),
    says(
        &["0x1d", "coreml 29"],
        &[cause(
            "a state that is written: the second of two was refused elsewhere",
            "",
            &[("--history", "host"), ("--cache", "host")],
        )],
    ),
    says(
        &["0x20004", "failed to allocate", "iosurface", "out of memory", "signal 9"],
        &[cause(
            "memory of the Neural Engine or of the machine",
            "smaller packages (--experts-per-shard, --ffn-shards), less loaded at once (--max-loaded)",
            &[],
        )],
    ),
    says(
        &["opset", "specification version", "newer version", "unsupported version", "parse ml program"],
        &[cause("the system is older than the package's operations", "macOS 15 or later", &[])],
    ),
    says(
        &["compile the model with xcode", "unable to load model", "coremldata.bin", "no such file"],
        &[cause("the compiled model is damaged or half there", "anemoe compile --again", &[])],
    ),
    says(
        &["tensor data type", "data type"],
        &[cause(
            "elements of a type that the Neural Engine does not have",
            "anemoe check --ops names them",
            &[],
        )],
    ),
    CauseRule {
        end: Some(End::Crashed),
        ..says(
            &["dequantize", "mlir", "mpsgraph"],
            &[cause(
                "the GPU's compiler stumbles over compressed weights",
                "another kind of compression: --quant lut4 without scales",
                &[],
            )],
        )
    },
    CauseRule {
        end: Some(End::Crashed),
        ..says(
            &[],
            &[cause(
                "a C++ exception or a fault inside of Core ML, which ends the process that asks",
                "report it with the message; anemoe tune finds forms that do not do this",
                ANY_FORM,
            )],
        )
    },
    CauseRule {
        end: Some(End::Hung),
        step: Some("compile"),
        ..says(
            &[],
            &[cause(
                "a large package: compilation takes minutes for some hundred MB",
                "a longer --timeout, or smaller packages (--experts-per-shard, --ffn-shards)",
                &[("--experts", "bank"), ("--attention", "per-head")],
            )],
        )
    },
    CauseRule {
        end: Some(End::Hung),
        ..says(
            &[],
            &[cause(
                "Core ML's service compiles for minutes at a first load, or hangs",
                "a longer --timeout; log out and in, or restart, if other programs hang too",
                ANY_FORM,
            )],
        )
    },
    says(&[], &[cause("not known", "report it with the message", ANY_FORM)]),
];

/// Returns the likely causes of a step's failure, the most likely first.
pub fn of(end: End, step: &str, message: &str) -> Vec<Cause> {
    let message = message.to_lowercase();
    let fits = |rule: &&CauseRule| {
        rule.end.is_none_or(|e| e == end)
            && rule.step.is_none_or(|s| s == step)
            && (rule.message_parts.is_empty() || rule.message_parts.iter().any(|part| message.contains(part)))
    };
    RULES.iter().find(fits).map(|rule| rule.causes.to_vec()).unwrap_or_default()
}

/// Tells whether a message reports an execution plan that could not be built (-14).
pub fn is_no_plan(message: &str) -> bool {
    let message = message.to_lowercase();
    NO_PLAN.iter().any(|part| message.contains(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_end_has_a_cause() {
        for end in [End::Refused, End::Crashed, End::Hung] {
            for step in ["compile", "load", "plan", "measure"] {
                let found = of(end, step, "something else");
                assert!(!found.is_empty() && found.iter().all(|c| !c.text.is_empty()), "{end:?} {step}");
            }
        }
    }

    #[test]
    fn messages_of_others_find_their_causes() {
        let first = |message: &str| of(End::Refused, "load", message)[0].text;
        let no_plan = "com.apple.CoreML -14: Failed to build the model execution plan using a model architecture file with \
                       error code: -14.";
        assert!(is_no_plan(no_plan) && first(no_plan).contains("another version of the system"));
        assert!(first("ANECCompile() FAILED: err=()").contains("compiler"));
        assert!(first("Unable to compute the prediction: 0x1d").contains("state"));
        assert!(first("Program load failure (0x20004)").contains("memory"));
        assert!(first("No space left on device").contains("disk"));
        assert!(of(End::Crashed, "load", "libc++abi: std::bad_cast")[0].text.contains("flexible"));
        assert!(of(End::Hung, "compile", "")[0].advice.contains("--timeout"));
    }
}
