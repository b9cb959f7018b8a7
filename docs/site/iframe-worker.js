// Browsers do not start workers for pages that are opened as files. There, the worker of the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      this.scope.importScripts = async (...urls) => {
        for (const each of urls) await this.load(each);
      };
      this.ready = this.load(url);
    }
    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.scope.document.createElement("script");
        Object.assign(script, { src: new URL(url, location.href).href, async: false, onload: resolve, onerror: reject });
        this.scope.document.body.append(script);
      });
    }
    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.scope.frameElement.remove();
    }
  };
}
