//! The operations of a phase: verbs, their options and patterns.

use super::*;

/// The `how` of a lock that is one.
const MLOCK: &str = "mlock";

const ACCESS: &[(&str, Access)] = &[
    ("read", Access::Read),
    ("write", Access::Write),
    ("verify", Access::Verify),
    ("rewrite", Access::Rewrite),
];

impl Resolver<'_> {
    pub(super) fn op(
        &self,
        seed: u64,
        raw: &Spanned<RawOp>,
        member: Option<(&str, RegionId)>,
    ) -> Resolved<Op> {
        let span = raw.span();
        let op = raw.get_ref();
        let RawOp { map, unmap, lock, unlock, advise, touch, replay, sleep, barrier, .. } = op;
        let words = [map, unmap, lock, unlock, advise, touch, replay];
        let verbs = words.iter().filter(|verb| verb.is_some()).count()
            + usize::from(sleep.is_some())
            + usize::from(*barrier == Some(true));
        if verbs != 1 {
            let message = format!("an operation has one verb, this one has {verbs}");
            let remedy =
                "use one of map, unmap, lock, unlock, advise, touch, sleep, barrier = true";
            return Err(self.error(span, message, remedy));
        }
        self.check_options(span.clone(), op)?;
        let target = |word: &Word| self.target(word, member);
        if let Some(word) = replay {
            return self.replay(word, target(word)?);
        }
        Ok(match (map, unmap, lock, unlock, advise, touch, sleep) {
            (Some(word), ..) => Op::Map(target(word)?),
            (_, Some(word), ..) => Op::Unmap(target(word)?),
            (_, _, Some(word), ..) => self.lock(op, target(word)?)?,
            (_, _, _, Some(word), ..) => Op::Unlock(target(word)?),
            (_, _, _, _, Some(word), ..) => {
                let Some(advice) = &op.advice else {
                    let remedy = "add advice = \"hugepage\" or another";
                    return Err(self.error(span, "advise needs an advice".into(), remedy));
                };
                Op::Advise { region: target(word)?, advice: self.advice(advice)? }
            }
            (_, _, _, _, _, Some(word), _) => {
                Op::Touch(self.touch(seed, span, op, target(word)?)?)
            }
            (.., Some(time)) => Op::Sleep(self.time(time)?),
            _ => Op::Barrier,
        })
    }

    /// Returns a lock, or the advice that the job tries instead of it.
    fn lock(&self, op: &RawOp, region: RegionId) -> Resolved<Op> {
        let whole = self.regions[region.0].1.bytes;
        let chunk = op.chunk.as_ref().map(|f| self.size(f)).transpose()?;
        let lock = Op::Lock { region, chunk_bytes: chunk.unwrap_or(whole).max(1) };
        match &op.how {
            Some(word) if self.word(word)? != MLOCK => {
                let known: Vec<_> =
                    [(MLOCK, Advice::Normal)].iter().chain(ADVICE).copied().collect();
                let advice = self.choice(word, "way to lock", &known)?;
                Ok(Op::Advise { region, advice })
            }
            _ => Ok(lock),
        }
    }

    fn replay(&self, word: &Word, region: RegionId) -> Resolved<Op> {
        let Some(recording) = self.job.recording.clone() else {
            let message = "there is no recording to replay: a job file has none".to_string();
            return Err(self.error(
                word.span(),
                message,
                "run a trace itself: pagetax run FILE.ptt",
            ));
        };
        Ok(Op::Replay(Replay { region, recording }))
    }

    /// Checks that a verb has all of its options and no others, such as a `stride` of a `lock`.
    fn check_options(&self, span: Range<usize>, op: &RawOp) -> Resolved<()> {
        let touch = op.touch.is_some();
        let options = [
            ("chunk", op.chunk.is_some(), op.lock.is_some(), "lock"),
            ("how", op.how.is_some(), op.lock.is_some(), "lock"),
            ("advice", op.advice.is_some(), op.advise.is_some(), "advise"),
            ("access", op.access.is_some(), touch, "touch"),
            ("pattern", op.pattern.is_some(), touch, "touch"),
            ("stride", op.stride.is_some(), touch, "touch"),
            ("theta", op.theta.is_some(), touch, "touch"),
            ("count", op.count.is_some(), touch, "touch"),
            ("grain", op.grain.is_some(), touch, "touch"),
        ];
        for (name, given, fits, verb) in options {
            if given && !fits {
                let message =
                    format!("`{name}` is an option of `{verb}`, which this operation is not");
                return Err(self.error(span, message, format!("remove `{name}`")));
            }
        }
        Ok(())
    }

    fn touch(
        &self,
        seed: u64,
        span: Range<usize>,
        op: &RawOp,
        region: RegionId,
    ) -> Resolved<Touch> {
        let bytes = self.regions[region.0].1.bytes;
        let grain = op.grain.as_ref().map(|f| self.size(f)).transpose()?.unwrap_or(8);
        let access =
            op.access.as_ref().map_or(Ok(Access::Read), |w| self.choice(w, "access", ACCESS))?;
        let pattern = self.pattern(span.clone(), op, grain)?;
        let lap = match pattern {
            Pattern::Strided { stride_bytes } => {
                Some(bytes.saturating_sub(grain) / stride_bytes.max(1) + 1)
            }
            Pattern::PointerChase => Some((bytes / grain.max(1)).max(1)),
            Pattern::Uniform | Pattern::Zipf { .. } => None,
        };
        let count = match (&op.count, lap) {
            (Some(field), _) => self.count(field, 1, u64::MAX / 2)?,
            (None, Some(lap)) => lap,
            (None, None) => {
                let message = "a random pattern has no natural end".to_string();
                return Err(self.error(span, message, "add count = 1_000_000 or another number"));
            }
        };
        Ok(Touch { region, access, pattern, count, grain_bytes: grain, seed })
    }

    fn pattern(&self, span: Range<usize>, op: &RawOp, grain: u64) -> Resolved<Pattern> {
        let name = op.pattern.as_ref().map_or(Ok("sequential"), |w| {
            let known = ["sequential", "strided", "uniform", "zipf", "pointer-chase"];
            self.choice(w, "pattern", &known.map(|name| (name, name)))
        })?;
        let stride = op.stride.as_ref().map(|f| self.size(f)).transpose()?;
        let misplaced =
            (name != "strided" && stride.is_some()).then_some("stride belongs to strided");
        let misplaced =
            misplaced.or((name != "zipf" && op.theta.is_some()).then_some("theta belongs to zipf"));
        if let Some(message) = misplaced {
            return Err(self.error(span, message.into(), "remove it or change the pattern"));
        }
        Ok(match (name, stride) {
            ("strided", Some(stride_bytes)) => Pattern::Strided { stride_bytes },
            ("strided", None) => {
                let message = "a strided pattern needs a stride, a multiple of 8 bytes".to_string();
                return Err(self.error(span, message, "add stride = \"4K\" or another"));
            }
            ("uniform", _) => Pattern::Uniform,
            ("zipf", _) => {
                let theta = |f| self.number(f, THETA_MIN, THETA_MAX);
                Pattern::Zipf { theta: op.theta.as_ref().map_or(Ok(0.99), theta)? }
            }
            ("pointer-chase", _) => Pattern::PointerChase,
            _ => Pattern::Strided { stride_bytes: grain },
        })
    }
}
