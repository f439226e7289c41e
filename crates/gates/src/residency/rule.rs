//! Rules of residency: evidence, verdicts and matchers.

use super::graph::{Graph, Op};
use serde::{Serialize, Serializer};

/// Question that a rule answers. A graph has to pass all three to run on the ANE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Question {
    /// Can the ANE take this op at all?
    Admissible,
    /// Will Core ML choose the ANE for it?
    Preferred,
    /// Will the package compile, load and run there?
    Loads,
}

/// Weight of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RuleSeverity {
    /// A limit: no cost decision gets around it.
    Hard,
    /// A tendency that was measured, in a direction that context may change.
    Soft,
    /// Worth knowing; decides nothing.
    Warning,
}

/// Device that something will run on. Always a prediction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// On the Neural Engine.
    Ane,
    /// The evidence is missing, or contradicts itself.
    Unknown,
    /// Elsewhere.
    NotAne,
}

impl Verdict {
    /// Name in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Verdict::Ane => "ane",
            Verdict::Unknown => "unknown",
            Verdict::NotAne => "not_ane",
        }
    }
}

/// Strength of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Strength {
    /// Several independent measurements agree.
    A,
    /// One careful measurement.
    B,
    /// A claim, or measurements that contradict each other.
    C,
}

/// Source of a finding, and the chip that it was made on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Evidence {
    /// Project and place in it. The part before the colon is the family, by which [`super::outcomes`] leaves evidence out.
    pub source: &'static str,
    /// Chip; empty where the source does not say.
    pub chip: &'static str,
    /// System; empty where the source does not say.
    pub os: &'static str,
    /// Strength of the finding.
    pub strength: Strength,
    /// Observation.
    pub finding: &'static str,
}

/// Machine that the packages are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceTarget {
    /// A Mac.
    #[default]
    Mac,
    /// An iPhone.
    Iphone,
}

/// Compute units that the packages are loaded with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Units {
    /// `MLComputeUnits.cpuAndNeuralEngine`
    #[default]
    CpuAndNe,
    /// `MLComputeUnits.all`: the GPU competes.
    All,
}

/// A chip, as far as rules tell them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Chip {
    /// `M` or `A`.
    pub mac: bool,
    /// Number in its name.
    pub number: u32,
}

impl Chip {
    /// Numbers of Mac chips that rules know of.
    pub const MAC: std::ops::RangeInclusive<u32> = 1..=5;
    /// Numbers of iPhone chips that rules know of.
    pub const IPHONE: std::ops::RangeInclusive<u32> = 11..=19;

    /// Lists all known names.
    pub fn names() -> String {
        let all = Chip::MAC.map(|n| format!("m{n}")).chain(Chip::IPHONE.map(|n| format!("a{n}")));
        all.collect::<Vec<_>>().join(", ")
    }

    /// Reads `m4`, `M3 Max`, `m3max`, `A19 Pro`.
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

    /// The chip takes wider extents, as reported from A16 and M4 on.
    pub const fn wide_extents(self) -> bool {
        if self.mac { self.number >= 4 } else { self.number >= 16 }
    }

    /// The chip's validator names 65536 channels as the most: up to M3 and A16.
    pub const fn few_channels(self) -> bool {
        if self.mac { self.number <= 3 } else { self.number <= 16 }
    }

    /// The chip has sine and cosine: A15, M3 and later.
    pub const fn trigonometry(self) -> bool {
        if self.mac { self.number >= 3 } else { self.number >= 15 }
    }
}

impl Serialize for Chip {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(&format_args!("{}{}", if self.mac { 'm' } else { 'a' }, self.number))
    }
}

/// Conditions that the packages will meet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Conditions {
    /// Kind of machine.
    pub target: DeviceTarget,
    /// Devices that Core ML may choose from.
    pub units: Units,
    /// Chip, where it is known.
    pub chip: Option<Chip>,
}

/// The functions of a package together.
#[derive(Clone, Debug, Default)]
pub struct PackageFacts {
    /// Bytes of weights as stored, shared ones once; where known.
    pub weight_bytes: Option<u64>,
    /// The functions.
    pub graphs: Vec<Graph>,
}

/// The packages of a bundle together.
#[derive(Clone, Copy, Debug, Default)]
pub struct BundleFacts {
    /// Number of packages.
    pub packages: u64,
    /// Bytes of all of them.
    pub bytes: u64,
}

/// A rule that applies.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Hit {
    /// The figures that made it apply.
    pub detail: String,
    /// Advice for this very case, where it can be more precise than the rule's.
    pub advice: Option<String>,
}

impl Hit {
    /// Without special advice.
    pub fn new(detail: impl Into<String>) -> Option<Hit> {
        Some(Hit { detail: detail.into(), advice: None })
    }
}

/// Subject of a rule, and the function that says if it applies.
#[derive(Clone, Copy)]
pub enum Matcher {
    /// Every op of these types.
    Types(&'static [&'static str]),
    /// An op.
    Op(fn(&Op, &Graph, &Conditions) -> Option<Hit>),
    /// A function as a whole.
    Graph(fn(&Graph, &Conditions) -> Option<Hit>),
    /// A package as a whole.
    Package(fn(&PackageFacts, &Conditions) -> Option<Hit>),
    /// A bundle as a whole.
    Bundle(fn(&BundleFacts, &Conditions) -> Option<Hit>),
}

/// One row of the table.
pub struct Rule {
    /// `AREA.NAME`, stable.
    pub id: &'static str,
    /// Question that it answers.
    pub question: Question,
    /// Weight.
    pub severity: RuleSeverity,
    /// Verdict when it applies. A warning decides nothing, whatever stands here.
    pub verdict: Verdict,
    /// Condition under which it applies.
    pub matcher: Matcher,
    /// Statement of the rule.
    pub text: &'static str,
    /// Advice: the change that helps.
    pub advice: &'static str,
    /// Evidence for it.
    pub evidence: &'static [Evidence],
}

impl Rule {
    /// Scope of the rule, in words.
    pub fn scope(&self) -> String {
        match self.matcher {
            Matcher::Types(types) => types.join(", "),
            Matcher::Op(_) => "an op".into(),
            Matcher::Graph(_) => "a function".into(),
            Matcher::Package(_) => "a package".into(),
            Matcher::Bundle(_) => "a bundle".into(),
        }
    }

    /// The strongest of its evidence.
    pub fn strength(&self) -> Option<Strength> {
        self.evidence.iter().map(|e| e.strength).min()
    }

    /// True if it would still stand without the findings of one family of sources.
    pub fn stands_without(&self, family: &str) -> bool {
        self.evidence.iter().any(|e| family_of(e.source) != family)
    }
}

/// Sources of one author or project are one family.
pub fn family_of(source: &str) -> &str {
    let head = source.split([':', ' ', '#']).next().unwrap_or(source);
    match head {
        // One author's two repositories.
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
