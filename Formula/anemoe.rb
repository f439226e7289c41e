# Builds from source. Homebrew takes formulas from taps alone; a clone of the repository is one:
#   brew tap local/anemoe "$PWD" && brew install --HEAD local/anemoe/anemoe
# This has not been run yet: there was no Homebrew where it was written.
class Anemoe < Formula
  desc "Language models on the Apple Neural Engine, and on any CPU"
  license any_of: ["MIT", "Apache-2.0"]
  head "file://#{File.expand_path("..", __dir__)}", using: :git, branch: "main"

  depends_on "rust" => :build

  def install
    system "cargo", "install", *std_cargo_args(path: "crates/cli")
    generate_completions_from_executable(bin/"anemoe", "completions")
    system bin/"anemoe", "man", "--out", "man1"
    man1.install Dir["man1/*.1"]
  end

  test do
    assert_match "gemma4", shell_output("#{bin}/anemoe plan synthetic:gemma4-mini --quant lut4 --json")
  end
end
