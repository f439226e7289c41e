//! Rules of residency: evidence, verdicts and matchers.

use crate::program_facts::PackageFacts;
use crate::program_facts::graph::{Graph, Op};
use serde::{Deserialize, Serialize, Serializer};

/// Question that a rule answers. A graph has to pass all three questions to run on the ANE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Question {
    /// Can the ANE take the op at all?
    Admissible,
    /// Will Core ML choose the ANE for the op?
    Preferred,
    /// Will the package compile, load and run on the ANE?
    Loads,
}

/// Severity of a rule: how far it decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RuleSeverity {
    /// A limit, whatever the costs are.
    Hard,
    /// A measured tendency, whose direction may change with the context.
    Soft,
    /// A fact that decides nothing.
    Warning,
}

/// Device that a program will run on. Always a prediction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// On the Neural Engine.
    Ane,
    /// Unknown: the evidence is missing, or contradicts itself.
    #[default]
    Unknown,
    /// Elsewhere: on the CPU or GPU, in whole or in part.
    NotAne,
}

impl Verdict {
    /// Returns the name in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Verdict::Ane => "ane",
            Verdict::Unknown => "unknown",
            Verdict::NotAne => "not_ane",
        }
    }
}

/// Strength of a finding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Strength {
    /// Several independent measurements agree.
    A,
    /// One careful measurement.
    B,
    /// A claim, or measurements that contradict each other.
    #[default]
    C,
}

/// Finding with its source, and the chip that it was made on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Evidence {
    /// Project and place in it. The part before the colon is the family, which [`super::outcomes`] can leave out.
    pub source: String,
    /// Chip; empty where the source does not say.
    pub chip: String,
    /// Operating system; empty where the source does not say.
    pub os: String,
    /// Strength of the finding.
    pub strength: Strength,
    /// Finding: what was observed.
    pub finding: String,
    /// Ids of rows in the table of outcomes that show the finding.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rows: Vec<String>,
}

/// Kind of machine that the packages are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceTarget {
    /// A Mac.
    #[default]
    Mac,
    /// An iPhone.
    Iphone,
}

/// Compute units with which the packages are loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Units {
    /// `MLComputeUnits.cpuAndNeuralEngine`.
    #[default]
    CpuAndNe,
    /// `MLComputeUnits.all`: the GPU competes with the ANE.
    All,
}

/// Chip, as far as rules tell chips apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Chip {
    /// True for `M` chips, false for `A` chips.
    pub mac: bool,
    /// Number in the chip's name.
    pub number: u32,
}

impl Chip {
    /// Numbers of the Mac chips that rules know.
    pub const MAC: std::ops::RangeInclusive<u32> = 1..=5;
    /// Numbers of the iPhone chips that rules know.
    pub const IPHONE: std::ops::RangeInclusive<u32> = 11..=19;

    /// Returns all known names, with commas.
    pub fn names() -> String {
        let all = Chip::MAC.map(|n| format!("m{n}")).chain(Chip::IPHONE.map(|n| format!("a{n}")));
        all.collect::<Vec<_>>().join(", ")
    }

    /// Parses a name such as `m4`, `M3 Max`, `m3max` or `A19 Pro`. Returns `None` for unknown chips.
    pub fn parse(text: &str) -> Option<Chip> {
        let text = text.trim();
        let mac = match text.chars().next()?.to_ascii_lowercase() {
            'm' => true,
            'a' => false,
            _ => return None,
        };
        let digits: String = text[1..].chars().take_while(char::is_ascii_digit).collect();
        let rest = &text[1 + digits.len()..];
        let number = digits.parse().ok()?;
        let known = if mac { Chip::MAC } else { Chip::IPHONE };
        let size = rest.trim_start_matches([' ', '-', '_']).to_ascii_lowercase();
        let is_size = ["", "pro", "max", "ultra"].contains(&size.as_str());
        (known.contains(&number) && (is_size || rest.starts_with(' '))).then_some(Chip { mac, number })
    }

    /// Tells whether the chip takes wider extents, as reported from A16 and M4 on.
    pub const fn wide_extents(self) -> bool {
        if self.mac { self.number >= 4 } else { self.number >= 16 }
    }

    /// Tells whether the chip's validator allows at most 65536 channels: up to M3 and A16.
    pub const fn limits_channels(self) -> bool {
        if self.mac { self.number <= 3 } else { self.number <= 16 }
    }

    /// Tells whether the chip has sine and cosine: from A15 and M3 on.
    pub const fn trigonometry(self) -> bool {
        if self.mac { self.number >= 3 } else { self.number >= 15 }
    }
}

impl Serialize for Chip {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(&format_args!("{}{}", if self.mac { 'm' } else { 'a' }, self.number))
    }
}

/// Conditions under which packages will run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Conditions {
    /// Kind of machine.
    pub target: DeviceTarget,
    /// Compute units that Core ML may choose from.
    pub units: Units,
    /// Chip, where it is known.
    pub chip: Option<Chip>,
}

/// Facts of a bundle's packages together.
#[derive(Clone, Copy, Debug, Default)]
pub struct BundleFacts {
    /// Number of packages.
    pub packages: u64,
    /// Bytes of all packages.
    pub bytes: u64,
    /// Most tokens that a call takes; `None` for a package without a cache, which may be no language model's.
    pub most_tokens: Option<u64>,
}

/// Match of a rule.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Hit {
    /// Figures that made the rule apply; empty where there are none.
    pub detail: String,
    /// Advice for this case, where it can be more precise than the rule's.
    pub advice: Option<String>,
}

impl Hit {
    /// Makes a match without special advice.
    pub fn new(detail: impl Into<String>) -> Option<Hit> {
        Some(Hit { detail: detail.into(), advice: None })
    }

    /// Makes a match with advice for this case.
    pub fn advised(detail: impl Into<String>, advice: impl Into<String>) -> Option<Hit> {
        Some(Hit { detail: detail.into(), advice: Some(advice.into()) })
    }
}

/// Subject of a rule, and the function that decides whether the rule applies.
#[derive(Clone, Copy, Default)]
pub enum Matcher {
    /// Every op of the rule's types.
    #[default]
    Types,
    /// An op.
    Op(fn(&Op, &Graph, &Conditions) -> Option<Hit>),
    /// A function as a whole.
    Graph(fn(&Graph, &Conditions) -> Option<Hit>),
    /// A function as a whole, where neither a rule nor a measured graph of its form and size decides.
    Otherwise(fn(&Graph, &Conditions) -> Option<Hit>),
    /// A package as a whole.
    Package(fn(&PackageFacts, &Conditions) -> Option<Hit>),
    /// A bundle as a whole.
    Bundle(fn(&BundleFacts, &Conditions) -> Option<Hit>),
}

/// Rule: a row of the table.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Id `AREA.NAME`, stable.
    #[serde(rename(serialize = "rule"))]
    pub id: String,
    /// Question that the rule answers.
    pub question: Question,
    /// Severity of the rule.
    pub severity: RuleSeverity,
    /// Verdict where the rule applies; without effect in a warning.
    pub verdict: Verdict,
    /// Op types, for a rule about every op of these types.
    #[serde(default)]
    pub types: Vec<String>,
    /// Condition under which the rule applies.
    #[serde(skip)]
    pub matcher: Matcher,
    /// Statement of the rule.
    pub text: String,
    /// Advice: a change that helps.
    #[serde(default)]
    pub advice: String,
    /// Evidence for the rule.
    #[serde(default)]
    pub evidence: Vec<Evidence>,
}

impl Rule {
    /// Returns the subject of the rule, in words.
    pub fn scope(&self) -> String {
        match self.matcher {
            Matcher::Types => self.types.join(", "),
            Matcher::Op(_) => "an op".into(),
            Matcher::Graph(_) => "a function".into(),
            Matcher::Otherwise(_) => "a function that nothing else decides".into(),
            Matcher::Package(_) => "a package".into(),
            Matcher::Bundle(_) => "a bundle".into(),
        }
    }

    /// Tells whether the rule decides something: whether it is no warning.
    pub fn decides(&self) -> bool {
        self.severity != RuleSeverity::Warning
    }

    /// Returns the verdict where the rule applies; a warning decides nothing.
    pub fn weight(&self) -> Verdict {
        if self.decides() { self.verdict } else { Verdict::Ane }
    }

    /// Tells whether the rule has evidence outside of one family of sources.
    pub fn stands_without(&self, family: &str) -> bool {
        self.evidence.iter().any(|e| family_of(&e.source) != family)
    }

    /// Tells whether the rule applies to a package or some of its functions and ops.
    pub fn applies(&self, p: &PackageFacts, c: &Conditions) -> bool {
        let ops =
            |test: &dyn Fn(&Op, &Graph) -> bool| p.graphs.iter().any(|g| g.ops.iter().any(|op| test(op, g)));
        match self.matcher {
            Matcher::Types => ops(&|op, _| self.types.contains(&op.op_type)),
            Matcher::Op(matches) => ops(&|op, g| matches(op, g, c).is_some()),
            Matcher::Graph(matches) => p.graphs.iter().any(|g| matches(g, c).is_some()),
            Matcher::Package(matches) => matches(p, c).is_some(),
            Matcher::Otherwise(_) | Matcher::Bundle(_) => false,
        }
    }
}

/// Returns the family of a source: sources of one author or project are one family.
pub fn family_of(source: &str) -> &str {
    let head = source.split([':', ' ', '#']).next().unwrap_or(source);
    match head {
        // Two repositories of one author.
        "AB" | "EM" | "ane-book" | "emilio" => "ane-book",
        "LQ" | "larql" => "larql",
        "IK" | "InferKit" => "InferKit",
        "FA" | "FluidAudio" => "FluidAudio",
        "JR" | "CoreML-LLM" => "CoreML-LLM",
        "AF" | "ANEForge" => "ANEForge",
        "OX" | "onnxsim" => "onnxsim",
        other => other,
    }
}
