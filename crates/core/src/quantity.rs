//! Quantities in job files: numbers with units, parameters and the four operations.
//!
//! `"$size / $process_size"` is a count, `"$memory / 4"` a size, `"2 * $period"` a time. That is
//! all: there is no scripting. Invariant: a size never passes where a time or a count is asked.

use crate::expression::{self, Cursor, Language};
use crate::units::{size_factor, time_factor};
use std::collections::BTreeMap;

/// The dimension of a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dimension {
    /// A plain number: a count, a rate, an exponent.
    Number,
    /// Bytes.
    Size,
    /// Nanoseconds.
    Time,
}

impl Dimension {
    /// Returns a description for messages, such as "a size such as 64M".
    pub fn describe(self) -> &'static str {
        match self {
            Dimension::Number => "a plain number such as 16",
            Dimension::Size => "a size such as 64M",
            Dimension::Time => "a time such as 40ms",
        }
    }
}

/// A number with its dimension.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Quantity {
    /// The number in bytes, nanoseconds or units.
    pub value: f64,
    /// The dimension of `value`.
    pub dimension: Dimension,
}

/// An error: an expression has no value.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum QuantityError {
    /// The text is no expression.
    #[error("`{text}`: expected {expected}, found {found}")]
    Syntax {
        /// The whole expression, as the job has it.
        text: String,
        /// A description of what is right.
        expected: &'static str,
        /// The text that stands there instead.
        found: String,
    },
    /// An unknown parameter.
    #[error("`${0}` is no parameter of this job; it has {1}")]
    UnknownParameter(String, String),
    /// Parameters that refer to each other.
    #[error("parameter `{0}` refers to itself")]
    Circular(String),
    /// A sum of a size and a time, or the like.
    #[error("`{0}` mixes sizes, times and plain numbers")]
    Mixed(String),
    /// Parentheses or parameters that are nested too deeply.
    #[error("`{0}` is too long or too deeply nested")]
    TooDeep(String),
    /// A division by zero, or a value out of range.
    #[error("`{0}` has no finite value of zero or more")]
    OutOfRange(String),
}

/// The most atoms of one evaluation. Parameters that each use another twice grow exponentially.
const ATOMS_MAX: u32 = 10_000;
/// The most nested parentheses and functions.
const DEPTH_MAX: u32 = 32;

/// The values of parameters as text, by name.
pub type Params = BTreeMap<String, String>;

/// Evaluates `text`, with the values of `$name` from `params`.
pub fn evaluate(text: &str, params: &Params) -> Result<Quantity, QuantityError> {
    let value = evaluate_within(text, params, &mut Visit::default())?;
    if !value.value.is_finite() || value.value < 0.0 {
        return Err(QuantityError::OutOfRange(text.into()));
    }
    Ok(value)
}

/// The state of an evaluation.
#[derive(Default)]
struct Visit {
    /// The parameters under evaluation, outermost first.
    open_params: Vec<String>,
    atoms: u32,
    depth: u32,
}

fn evaluate_within(
    text: &str,
    params: &Params,
    visit: &mut Visit,
) -> Result<Quantity, QuantityError> {
    expression::parse(text, &mut Quantities { text, params, visit })
}

/// The language of quantities.
struct Quantities<'a> {
    /// The whole expression, for errors.
    text: &'a str,
    params: &'a Params,
    visit: &'a mut Visit,
}

impl Language for Quantities<'_> {
    type Value = Quantity;
    type Error = QuantityError;

    fn enter(&mut self) -> Result<(), QuantityError> {
        self.visit.atoms += 1;
        self.visit.depth += 1;
        match self.visit.atoms > ATOMS_MAX || self.visit.depth > DEPTH_MAX {
            true => Err(QuantityError::TooDeep(self.text.into())),
            false => Ok(()),
        }
    }

    fn leave(&mut self) {
        self.visit.depth -= 1;
    }

    fn unexpected(&self, rest: &str, expected: &'static str) -> QuantityError {
        let found = match rest {
            "" => "the end".to_string(),
            rest => format!("`{rest}`"),
        };
        QuantityError::Syntax { text: self.text.into(), expected, found }
    }

    fn combine(
        &mut self,
        left: Quantity,
        operator: char,
        right: Quantity,
    ) -> Result<Quantity, QuantityError> {
        use Dimension::Number;
        let dimension = match (operator, left.dimension, right.dimension) {
            ('+' | '-', same, other) if same == other => same,
            ('*', Number, other) | ('*', other, Number) | ('/', other, Number) => other,
            ('/', over, under) if over == under => Number,
            _ => return Err(QuantityError::Mixed(self.text.into())),
        };
        let value = match operator {
            '+' => left.value + right.value,
            '-' => left.value - right.value,
            '*' => left.value * right.value,
            _ => left.value / right.value,
        };
        Ok(Quantity { value, dimension })
    }

    fn atom(&mut self, cursor: &mut Cursor<'_>) -> Result<Quantity, QuantityError> {
        if cursor.eat("$") {
            let name = cursor.take_while(|c| c.is_ascii_alphanumeric() || c == '_');
            return self.parameter(name);
        }
        for (name, pick) in [("min(", f64::min as fn(f64, f64) -> f64), ("max(", f64::max)] {
            if cursor.eat(name) {
                return self.extremum(cursor, pick);
            }
        }
        self.number(cursor)
    }
}

impl Quantities<'_> {
    fn extremum(
        &mut self,
        cursor: &mut Cursor<'_>,
        pick: fn(f64, f64) -> f64,
    ) -> Result<Quantity, QuantityError> {
        let mut best = expression::sum(cursor, self)?;
        while cursor.eat(",") {
            let next = expression::sum(cursor, self)?;
            if next.dimension != best.dimension {
                return Err(QuantityError::Mixed(self.text.into()));
            }
            best.value = pick(best.value, next.value);
        }
        expression::expect(cursor, self, ")", "`,` or `)`")?;
        Ok(best)
    }

    fn parameter(&mut self, name: &str) -> Result<Quantity, QuantityError> {
        let Some(text) = self.params.get(name) else {
            let known: Vec<_> = self.params.keys().map(|k| format!("${k}")).collect();
            return Err(QuantityError::UnknownParameter(name.into(), known.join(", ")));
        };
        if self.visit.open_params.iter().any(|outer| outer == name) {
            return Err(QuantityError::Circular(name.into()));
        }
        self.visit.open_params.push(name.into());
        let value = evaluate_within(text, self.params, self.visit);
        self.visit.open_params.pop();
        value
    }

    fn number(&mut self, cursor: &mut Cursor<'_>) -> Result<Quantity, QuantityError> {
        let start = cursor.rest();
        let digits = cursor.take_while(|c| c.is_ascii_digit() || c == '.' || c == '_');
        let Ok(number) = digits.replace('_', "").parse::<f64>() else {
            return Err(self.unexpected(start, "a number or a $parameter"));
        };
        let unit_start = cursor.rest();
        let unit = cursor.take_while(char::is_alphabetic);
        let (factor, dimension) = match unit {
            "" => (1, Dimension::Number),
            unit => match (time_factor(unit), size_factor(unit)) {
                (Some(factor), _) => (factor, Dimension::Time),
                (None, Some(factor)) => (factor, Dimension::Size),
                (None, None) => {
                    let expected = "a unit (K M G T, ns us ms s min h) or none";
                    return Err(self.unexpected(unit_start, expected));
                }
            },
        };
        Ok(Quantity { value: number * factor as f64, dimension })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(pairs: &[(&str, &str)]) -> Params {
        pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect()
    }

    #[test]
    fn sizes_divide_to_counts() {
        let p = params(&[("size", "32M"), ("each", "2M")]);
        let q = evaluate("$size / $each", &p).unwrap();
        assert_eq!(q, Quantity { value: 16.0, dimension: Dimension::Number });
        let q = evaluate("min($size, 3 * $each) / 2", &p).unwrap();
        assert_eq!(q, Quantity { value: (3u64 << 20) as f64, dimension: Dimension::Size });
        let q = evaluate("2s / 50", &p).unwrap();
        assert_eq!(q, Quantity { value: 40e6, dimension: Dimension::Time });
    }

    #[test]
    fn doubling_parameters_do_not_hang() {
        let double = |i: u32| (format!("p{i}"), format!("$p{} + $p{}", i + 1, i + 1));
        let mut p: Params = (0..30).map(double).collect();
        p.insert("p30".into(), "1".into());
        assert!(matches!(evaluate("$p0", &p), Err(QuantityError::TooDeep(_))));
    }

    #[test]
    fn mistakes_are_named() {
        let p = params(&[("a", "$b"), ("b", "$a"), ("n", "3")]);
        assert!(matches!(evaluate("$a", &p), Err(QuantityError::Circular(_))));
        assert!(matches!(evaluate("$c", &p), Err(QuantityError::UnknownParameter(..))));
        assert!(matches!(evaluate("2M + 3s", &p), Err(QuantityError::Mixed(_))));
        assert!(matches!(evaluate("3 / 0", &p), Err(QuantityError::OutOfRange(_))));
        assert!(matches!(evaluate("2 - 3", &p), Err(QuantityError::OutOfRange(_))));
        assert!(matches!(evaluate("2 +", &p), Err(QuantityError::Syntax { .. })));
        assert!(matches!(evaluate(&"(".repeat(9999), &p), Err(QuantityError::TooDeep(_))));
        assert!(matches!(evaluate("12parsec", &p), Err(QuantityError::Syntax { .. })));
    }
}
